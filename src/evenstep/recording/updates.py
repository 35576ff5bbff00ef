"""Counts the updates of each optimizer, and says which of them are recorded."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch


class Updates:
    """The updates of all optimizers of a process.

    Args:
        steps: how many updates of each optimizer are recorded.
        every: only every so many updates are, from the first on.
    """

    def __init__(self, steps: int, every: int) -> None:
        self._steps, self._every = steps, every
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._counts = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._numbers = weakref.WeakKeyDictionary()

    @property
    def is_due(self) -> bool:
        """Whether the update that the run is working towards is recorded."""
        done = min(self._counts.values(), default=0)
        return not self.is_done and done % self._every == 0

    @property
    def is_done(self) -> bool:
        """Whether all that are recorded are done."""
        return min(self._counts.values(), default=0) >= self._steps * self._every

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer: 0 for the first that was met."""
        self._counts.setdefault(optimizer, 0)
        return self._numbers.setdefault(optimizer, len(self._numbers))

    def done_by(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how many updates an optimizer has done."""
        return self._counts.get(optimizer, 0)

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has done an update."""
        self.number_of(optimizer)
        self._counts[optimizer] += 1


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group of parameters: learning rate, momentum and so on."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool | int | float | str | None):
            found[name] = value
        elif isinstance(value, tuple):
            found[name] = [one for one in value if isinstance(one, int | float)]
    return found
