"""Waits for the losses of steps in flight and reports them to the display."""

from __future__ import annotations

import time
from collections import deque

from evenstep.cli.terminal.display import Display
from evenstep.cli.terminal.progress import Progress
from evenstep.engine import Pending
from evenstep.training.trainer import Trainer


class StepsInFlight:
    """The steps that were submitted and have not been reported yet."""

    def __init__(self, trainer: Trainer, progress: Progress, display: Display) -> None:
        self._trainer = trainer
        self._progress = progress
        self._display = display
        self._steps: deque[tuple[Pending, int]] = deque()
        self._since_s = time.perf_counter()
        self._compile_s = 0.0

    def add(self, loss: Pending, examples: int) -> None:
        """Add a step that was submitted with so many examples."""
        self._steps.append((loss, examples))

    def wait(self, *, down_to: int = 0) -> None:
        """Wait until at most `down_to` steps are in flight. Compile time does not count."""
        while len(self._steps) > down_to:
            loss, examples = self._steps.popleft()
            value = float(loss)
            now_s = time.perf_counter()
            compile_s, self._compile_s = self._compile_s, self._trainer.compile_s
            self._progress.add(
                loss=value,
                examples=examples,
                took_s=now_s - self._since_s - (self._compile_s - compile_s),
                busy_s=self._trainer.busy_s,
            )
            self._since_s = now_s
            self._display.show(self._progress)

    def restart_clock(self) -> None:
        """Exclude the time since the last step, when the devices had no work, from its speed."""
        self._since_s = time.perf_counter()
