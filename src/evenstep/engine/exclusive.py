"""A lock for changes that a destructor may request in the middle of another change.

The garbage collector runs destructors between any two instructions, and a destructor may call the
engine. A change that it requests while another one is in progress is made after that one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


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
        while self._later:
            try:
                later = self._later.popleft()
            except IndexError:  # another thread makes the last one
                return
            later()

    def locked(self) -> bool:
        """Return whether a thread holds the lock."""
        return self._lock.locked()

    def change(self, change: Callable[[], object]) -> None:
        """Call `change` with the lock held: now, or as soon as the caller has released the lock.

        The value that it returns is freed without the lock: its destructor may call the engine.
        """
        if self.owner == threading.get_ident():  # called by a destructor
            self._later.append(lambda: self.change(change))
            return
        with self:
            left = change()
        del left
