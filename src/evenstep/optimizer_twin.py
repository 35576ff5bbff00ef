"""The user's optimizer, stepped later than it was asked for, with the settings of then.

While a step is in flight the front end goes on: a scheduler sets the next learning rate in
`optimizer.param_groups` before the update that wants the old one. So the lanes step a twin, which
shares the optimizer's state and parameters but has groups of its own; what the front end changes
in its groups is recorded with each step and reaches the twin's when that step is updated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Change(NamedTuple):
    """A value that the front end has set in one of the parameter groups."""

    group: int
    key: str
    value: Any


class OptimizerTwin:
    """Steps an optimizer in a lane while its owner may change its groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.renew()

    def renew(self) -> None:
        """Take the optimizer as it is now; only while no step is in flight."""
        twin = object.__new__(type(self._optimizer))
        twin.__dict__.update(self._optimizer.__dict__)
        # A scheduler wraps `step` on the instance, bound to the instance.
        twin.__dict__.pop("step", None)
        twin.param_groups = [_settings(group) for group in self._optimizer.param_groups]
        self._twin = twin
        self._seen = [_settings(group) for group in self._optimizer.param_groups]

    @property
    def fits(self) -> bool:
        """Whether the optimizer has the state and the parameters that it had."""
        ours, theirs = self._twin.param_groups, self._optimizer.param_groups
        return (
            self._twin.state is self._optimizer.state
            and len(ours) == len(theirs)
            and all(
                len(own["params"]) == len(its["params"])
                and all(map(_is, own["params"], its["params"]))
                for own, its in zip(ours, theirs, strict=True)
            )
        )

    def record(self) -> list[Change]:
        """Return what the front end has changed since the last `record`."""
        # Schedulers warn when they are stepped before the optimizer: this one will be.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        changes = [
            Change(number, key, copy.deepcopy(value))
            for number, (group, seen) in enumerate(
                zip(self._optimizer.param_groups, self._seen, strict=True)
            )
            for key, value in group.items()
            if key != "params" and not (key in seen and _equal(value, seen[key]))
        ]
        for change in changes:
            self._seen[change.group][change.key] = copy.deepcopy(change.value)
        return changes

    def step(self, changes: Sequence[Change]) -> None:
        """Update the parameters with the settings of when `changes` was recorded."""
        for change in changes:
            self._twin.param_groups[change.group][change.key] = change.value
        self._twin.step()

    def give_back(self) -> None:
        """Write what the updates have changed in the groups into the user's; none in flight."""
        for group, ours, seen in zip(
            self._optimizer.param_groups, self._twin.param_groups, self._seen, strict=True
        ):
            for key, value in ours.items():
                if key != "params" and not (key in seen and _equal(value, seen[key])):
                    group[key] = seen[key] = copy.deepcopy(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Copy a group: its values, but the same parameters."""
    return {
        key: list(value) if key == "params" else copy.deepcopy(value)
        for key, value in group.items()
    }


def _is(one: object, other: object) -> bool:
    return one is other


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
