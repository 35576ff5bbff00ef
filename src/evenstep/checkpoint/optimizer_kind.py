"""The class of an optimizer and the settings it was created with, compared when training resumes.

The state of one optimizer often loads into another one (Adam's into RAdam), which would then
compute something else from it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from evenstep.replicas import inner_optimizers, is_plain_value, python_number


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
        plain = {key: value for key, value in defaults.items() if is_plain_value(value)}
        return cls(name=f"{kind.__module__}.{kind.__qualname__}", defaults=plain)

    def facts(self, place: str) -> dict[str, Any]:
        """Return what must be the same when training resumes, by name.

        A user's class may move from a script to a module.
        """
        of = f"of the optimizer{place}"
        is_torchs = self.name.startswith("torch.")
        name = self.name if is_torchs else self.name.rpartition(".")[2]
        return {f"the class {of}": name, **{f"{k} {of}": v for k, v in self.defaults.items()}}


def kinds_of(optimizer: torch.optim.Optimizer) -> dict[str, OptimizerKind]:
    """Return the kinds of an optimizer and of those inside it, by their places in it."""
    optimizers = {"": optimizer, **inner_optimizers(optimizer)}
    return {place: OptimizerKind.of(one) for place, one in optimizers.items()}
