"""Of what kind an optimizer and a scheduler are: what is compared when training resumes.

The state of one optimizer often loads into another one (Adam's into RAdam), which would then
compute something else from it.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import shown
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
        name = _short(self.name)
        return {f"the class {of}": name, **{f"{k} {of}": v for k, v in self.defaults.items()}}


def kinds_of(optimizer: torch.optim.Optimizer) -> dict[str, OptimizerKind]:
    """Return the kinds of an optimizer and of those inside it, by their places in it."""
    optimizers = {"": optimizer, **inner_optimizers(optimizer)}
    return {place: OptimizerKind.of(one) for place, one in optimizers.items()}


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return which parameters the groups of an optimizer hold, in their order, as facts.

    Its state has numbers for parameters, which another order would give to others.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        held = [names.get(one, "one of none of the model's names") for one in group["params"]]
        digest = zlib.crc32("\0".join(held).encode())
        found[f"the parameters of group {number}"] = f"{shown(held)} ({digest:08x})"
    return found


def scheduler_kinds(scheduler: Any, place: str = "scheduler") -> dict[str, str]:
    """Return the class of a scheduler, and of those inside it, as facts."""
    kind = type(scheduler)
    found = {f"the class of the {place}": _short(f"{kind.__module__}.{kind.__qualname__}")}
    values = getattr(scheduler, "__dict__", {}).values()
    held = itertools.chain(*(one if isinstance(one, list | tuple) else (one,) for one in values))
    inner = (one for one in held if isinstance(one, LRScheduler))
    for number, one in enumerate(inner):
        found |= scheduler_kinds(one, f"{place}.{number}")
    return found


def _short(name: str) -> str:
    """Return the name of a class, with its module where that is torch's."""
    return name if name.startswith("torch.") else name.rpartition(".")[2]
