"""A lock for changes that a destructor may request in the middle of another change.

The garbage collector runs destructors between any two instructions, and a destructor may call the
engine. A change that it requests while another one is in progress is made after that one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Exclusive:
    """A lock that one thread holds at a time.

    Attributes:
        owner: the thread that holds it; None if it is free.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner: int | None = None
        self._later: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self.owner = None
        self._lock.release()
        self._make_later_ones()

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""
        return self._lock.locked()

    def change(self, change: Callable[[], T]) -> T | None:
        """Call `change` with the lock held: now, or as soon as the caller has released the lock.

        Returns:
            What it returns, to be freed without the lock: its destructor may call the engine. None
            if it will be called later.
        """
        if self.owner == threading.get_ident():  # called by a destructor
            self._later.append(lambda: self.change(change))
            return None
        with self._lock:  # not `with self`: an exception from outside could come just behind it
            self.owner = threading.get_ident()
            try:
                left = change()
            finally:
                self.owner = None
        self._make_later_ones()
        return left

    def _make_later_ones(self) -> None:
        while self._later:
            try:
                later = self._later.popleft()
            except IndexError:  # another thread makes the last one
                return
            later()
