"""The calls of modules that are running in a thread."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter

import torch


@dataclasses.dataclass(frozen=True)
class Frame:
    """A call that is running.

    Attributes:
        module: the module's name.
        kind: its class.
        trains: whether it is in training mode.
        examples: the size of the batch, if it is known.
        draws: the states of generators before; None if the call isn't recorded.
    """

    module: str
    kind: str
    trains: bool
    examples: int | None
    draws: list[torch.Tensor] | None


class Calls(threading.local):
    """The running calls of each thread, the innermost last.

    Attributes:
        frames: the calls.
        is_in_backward: whether a backward pass runs.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.is_in_backward = False
        self._operators: Counter[tuple[str, str]] = Counter()

    def enter(self, frame: Frame) -> None:
        """Note that a call begins."""
        if not self.frames:
            self._operators.clear()
        self.frames.append(frame)

    def number_of(self, module: str, operator: str) -> int:
        """Return how often an operator was called in a module before, in this pass."""
        self._operators[module, operator] += 1
        return self._operators[module, operator] - 1
