"""A lock that Ctrl-C cannot interrupt, so that the engine's bookkeeping is never half done.

Python runs signal handlers in the main thread between any two instructions. While `Guard.protected`
is active, a SIGINT that arrives while the main thread holds the lock, or waits for it, is handled
when the lock is released.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Guard:
    """A lock around changes that must be made completely or not at all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident
        self._main_is_inside = False
        self._handler: Any = None
        self._deferred: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._main_is_inside = True
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        if threading.get_ident() == self._main:
            self._main_is_inside = False
            if self._deferred is not None:
                deferred, self._deferred = self._deferred, None
                self._handler(*deferred)

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Defer Ctrl-C inside the lock while the context is open; only in the main thread."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.get_ident() != self._main or not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            # Only the main thread can restore the handler. Closed in another thread, ours stays and
            # forwards signals to the handler that it replaced.
            is_main = threading.get_ident() == self._main
            if is_main and signal.getsignal(signal.SIGINT) == self._on_signal:
                signal.signal(signal.SIGINT, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._main_is_inside:
            self._deferred = (number, frame)
        else:
            self._handler(number, frame)
