"""Ctrl-C and SIGTERM: the first signal lets the current step finish, a second one interrupts it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside `with`, the first signal has no effect until `check` is called; a second one raises.

    Both cases end in a KeyboardInterrupt. If it is raised in the middle of a step, the trainer
    restores the model to its state before that step. Signals that were ignored before (as in a
    background job) stay ignored.

    Args:
        on_request: called by the first signal, in the middle of whatever runs.
        same_signal_s: signals within so many seconds of the first count as one, because a launcher
            repeats the signal to its processes.

    Attributes:
        number: the first signal; Ctrl-C's as long as there is none.
    """

    def __init__(
        self, on_request: Callable[[], None] = lambda: None, *, same_signal_s: float = 0.0
    ) -> None:
        self.number = int(signal.SIGINT)
        self._on_request = on_request
        self._same_signal_s = same_signal_s
        self._requested_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal was received."""
        return self._requested_at is not None

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received."""
        if self.requested:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
            self.number = number
            self._on_request()
        elif now - self._requested_at >= self._same_signal_s:
            raise KeyboardInterrupt
