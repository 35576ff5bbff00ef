"""Lightning's Trainer (`import lightning`), with steps that evenstep computes."""

from __future__ import annotations

from evenstep.integrations.lightning_steps import EvenSteps

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError as error:
    raise ImportError(
        "evenstep.integrations.lightning needs lightning: pip install 'evenstep[lightning]'"
    ) from error


class EvenStrategy(EvenSteps, SingleDeviceStrategy):
    """See `EvenSteps`."""

    __doc__ = EvenSteps.__doc__
