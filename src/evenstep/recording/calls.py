"""The calls of modules that are running in a thread."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter

import torch


@dataclasses.dataclass(frozen=True)
class Frame:
    """A call that is running.

    `number` says how often the module was called before in this call of the model. `draws` are the
    states of generators before it; None if the call isn't recorded.
    """

    module: str
    kind: str
    trains: bool
    examples: int | None
    number: int
    draws: list[torch.Tensor] | None

    @property
    def name(self) -> str:
        """What the call is called in the record."""
        is_repeated = self.number and self.module  # the model that a wrapper calls has its name
        return f"{self.module} (call {self.number + 1})" if is_repeated else self.module


class Calls(threading.local):
    """The running calls of each thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.is_in_backward = False
        self._counts: Counter[tuple[str, str]] = Counter()

    def enter(self, frame: Frame) -> None:
        """Note that a call begins."""
        self.frames.append(frame)

    def number_of(self, module: str, operator: str = "") -> int:
        """Return how often a module, or an operator in it, was called before in this pass."""
        if not self.frames and not operator:
            self._counts.clear()
        self._counts[module, operator] += 1
        return self._counts[module, operator] - 1
