"""A lock that Ctrl-C can't break into.

Python runs signal handlers in the main thread between any two instructions, so Ctrl-C could leave
bookkeeping half changed. While `protected` holds, SIGINT that comes inside the lock is put off to
the end of the `with`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Guard:
    """A lock around bookkeeping that must be done wholly or not at all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._main_is_inside = False
        self._handler: Any = None
        self._put_off: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._main_is_inside = True
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        if threading.get_ident() == self._main:
            self._main_is_inside = False
            if self._put_off is not None:
                put_off, self._put_off = self._put_off, None
                self._handler(*put_off)

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Put off Ctrl-C inside the lock, from here to the end; only in the main thread."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.get_ident() != self._main or not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            is_main = threading.get_ident() == self._main  # closed elsewhere, it stays: it forwards
            if is_main and signal.getsignal(signal.SIGINT) == self._on_signal:
                signal.signal(signal.SIGINT, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._main_is_inside:
            self._put_off = (number, frame)
        else:
            self._handler(number, frame)
