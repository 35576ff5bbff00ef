"""The class of an optimizer and the settings it was created with, compared when training resumes.

The state of one optimizer often loads into another one (Adam's into RAdam), which would then
compute something else from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from evenstep.errors import CheckpointError
from evenstep.replicas import inner_optimizers, is_plain, python_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """The class of an optimizer and its plain settings.

    Attributes:
        name: the class, with its module.
        defaults: those of its default settings that are numbers, strings, None, or tuples and lists
            of these. A tensor is left out, since a scheduler may write to it.
    """

    name: str
    defaults: dict[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerKind:
        """Return the kind of an optimizer."""
        kind = type(optimizer)
        defaults = {key: python_number(value) for key, value in optimizer.defaults.items()}
        plain = {key: value for key, value in defaults.items() if is_plain(value)}
        return cls(name=f"{kind.__module__}.{kind.__qualname__}", defaults=plain)

    def is_of_same_class(self, other: OptimizerKind) -> bool:
        """Whether both are of one class. A user's class may move from a script to a module."""
        names = self.name, other.name
        own = not any(name.startswith("torch.") for name in names)
        return names[0] == names[1] or (own and len({n.rpartition(".")[2] for n in names}) == 1)


def kinds_of(optimizer: torch.optim.Optimizer) -> dict[str, OptimizerKind]:
    """Return the kinds of an optimizer and of those inside it, by their places in it."""
    optimizers = {"": optimizer, **inner_optimizers(optimizer)}
    return {place: OptimizerKind.of(one) for place, one in optimizers.items()}


def refuse_another_optimizer(
    saved: Mapping[str, OptimizerKind], optimizer: torch.optim.Optimizer
) -> None:
    """Refuse an optimizer that is not of the saved kind. Without saved kinds, any is accepted.

    Raises:
        CheckpointError: its class or a setting differs; the message names both.
    """
    for place, kind in kinds_of(optimizer).items():
        if place in saved:
            _refuse_another_kind(saved[place], kind)


def _refuse_another_kind(saved: OptimizerKind, now: OptimizerKind) -> None:
    if not saved.is_of_same_class(now):
        raise CheckpointError(
            f"the checkpoint is of another optimizer: it was saved with {saved.name}, and "
            f"Trainer.load got {now.name}: give it the optimizer that was trained with"
        )
    # A setting that only one of them has comes from another version of torch.
    common = [key for key in saved.defaults if key in now.defaults]
    different = [key for key in common if saved.defaults[key] != now.defaults[key]]
    if different:
        before, after = (
            ", ".join(f"{key}={kind.defaults[key]!r}" for key in different) for kind in (saved, now)
        )
        raise CheckpointError(
            f"the checkpoint is of {saved.name} with {before}, and Trainer.load got one with "
            f"{after}, which would have no effect: give the settings of the checkpoint, and change "
            f"optimizer.param_groups afterwards"
        )
