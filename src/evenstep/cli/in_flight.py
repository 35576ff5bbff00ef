"""Steps in flight, counted in their order as their losses arrive."""

from __future__ import annotations

import time
from collections import deque

from evenstep.cli.display import Display
from evenstep.cli.progress import Progress
from evenstep.engine import Pending
from evenstep.training.trainer import Trainer


class Landing:
    """Waits for losses, and tells progress and display of each."""

    def __init__(self, trainer: Trainer, progress: Progress, display: Display) -> None:
        self._trainer = trainer
        self._progress = progress
        self._display = display
        self._flying: deque[tuple[Pending, int]] = deque()
        self._since_s = time.perf_counter()
        self._compile_s = 0.0

    def expect(self, loss: Pending, examples: int) -> None:
        """Note a step that was submitted, of so many examples."""
        self._flying.append((loss, examples))

    def wait(self, *, down_to: int = 0) -> None:
        """Wait until no more than `down_to` steps are in flight."""
        while len(self._flying) > down_to:
            loss, examples = self._flying.popleft()
            value = float(loss)
            now = time.perf_counter()
            compile_s = self._trainer.compile_s
            self._since_s += compile_s - self._compile_s
            self._compile_s = compile_s
            self._progress.add(
                loss=value,
                examples=examples,
                took_s=now - self._since_s,
                busy_s=self._trainer.busy_s,
            )
            self._since_s = now
            self._display.show(self._progress)

    def leave_out(self) -> None:
        """Don't count the time since the last step: the devices had no work."""
        self._since_s = time.perf_counter()
