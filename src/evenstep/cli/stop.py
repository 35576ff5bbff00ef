"""Ctrl-C and SIGTERM: the first lets a run finish its step, a second one stops it at once."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside `with`, holds the first signal back until `check` is called.

    Both ways end in a KeyboardInterrupt. In the middle of a step the trainer then leaves the model
    as the step found it. A signal that is ignored (as in a background job) stays ignored.
    """

    def __init__(self, together_s: float = 0.0) -> None:
        """Signals within `together_s` seconds of the first count as one: a launcher repeats it."""
        self._together_s = together_s
        self._asked_at: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._asked_at is not None

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self.asked:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at >= self._together_s:
            raise KeyboardInterrupt
