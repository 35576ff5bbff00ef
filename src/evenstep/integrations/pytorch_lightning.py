"""Lightning's Trainer (`import pytorch_lightning`), with steps that evenstep computes."""

from __future__ import annotations

from evenstep.integrations.lightning_steps import EvenSteps

try:
    from pytorch_lightning.strategies import SingleDeviceStrategy
except ModuleNotFoundError as error:
    raise ImportError(
        "evenstep.integrations.pytorch_lightning needs pytorch_lightning: pip install "
        "pytorch-lightning"
    ) from error


class EvenStrategy(EvenSteps, SingleDeviceStrategy):
    """See `EvenSteps`."""

    __doc__ = EvenSteps.__doc__
