"""Counts the updates of each optimizer, and says which of them are recorded."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch


class Updates:
    """The updates of all optimizers of a process.

    An optimizer is known by the parameters that it updates: a copy counts as the same one. Of each
    optimizer `steps` updates are recorded: the first, and then one of `every`.
    """

    def __init__(self, steps: int, every: int) -> None:
        self._steps, self._every = steps, every
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._numbers = weakref.WeakKeyDictionary()
        self._updated: list[Hashable] = []  # by each optimizer
        self._done: list[int] = []

    @property
    def is_due(self) -> bool:
        """Whether the update that the run is working towards is recorded."""
        return not self.is_done and min(self._done, default=0) % self._every == 0

    @property
    def is_done(self) -> bool:
        """Whether all that are recorded are done."""
        return min(self._done, default=0) >= self._steps * self._every

    def is_known(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer was met."""
        return optimizer in self._numbers

    def meet(self, optimizer: torch.optim.Optimizer, updated: Hashable) -> None:
        """Note which parameters an optimizer updates."""
        if updated not in self._updated:
            self._updated.append(updated)
            self._done.append(0)
        self._numbers[optimizer] = self._updated.index(updated)

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer that was met: 0 for the first."""
        return self._numbers[optimizer]

    def done_by(self, optimizer: torch.optim.Optimizer) -> int:
        """Return how many updates an optimizer has done."""
        return self._done[self._numbers[optimizer]] if self.is_known(optimizer) else 0

    def count(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer that was met has done an update."""
        self._done[self._numbers[optimizer]] += 1


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
