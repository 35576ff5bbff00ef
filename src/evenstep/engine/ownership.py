"""Ties an engine or a trainer to the process that opened it, since a fork has none of its threads.

It is closed at exit, because the interpreter would end with SIGABRT while a thread is inside torch.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import weakref
from collections.abc import Callable

from evenstep.errors import ClosedError

logger = logging.getLogger("evenstep")


class Ownership:
    """Makes the calling process the owner of an engine or a trainer, until `end`.

    Args:
        what: "trainer" or "engine", for messages.
        close: a method that drops what has not begun and ends the threads; called when the
            interpreter exits before `end`. Only a weak reference to its object is kept.

    Attributes:
        pid: the process that owns it.
    """

    def __init__(self, what: str, close: Callable[[], None]) -> None:
        self._what = what
        self.pid = os.getpid()
        method = weakref.WeakMethod(close)
        self._at_exit = functools.partial(_close_left_open, what, self.pid, method)
        atexit.register(self._at_exit)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the calling process is a fork of the owner."""
        return os.getpid() != self.pid

    def refuse_elsewhere(self) -> None:
        """Refuse a call in a fork, which has none of the threads that it would wait for.

        Raises:
            ClosedError: the calling process is not the owner.
        """
        if os.getpid() != self.pid:
            raise ClosedError(
                f"a{'n' * (self._what[0] in 'aeiou')} {self._what} belongs to the process that "
                f"opened it (process {self.pid}), and this is process {os.getpid()}: open one "
                f"here, in the forked process"
            )

    def end(self) -> None:
        """Note that the threads have ended."""
        atexit.unregister(self._at_exit)


def _close_left_open(what: str, pid: int, method: weakref.WeakMethod[Callable[[], None]]) -> None:
    close = method()
    if close is not None and os.getpid() == pid:
        logger.warning(
            f"a{'n' * (what[0] in 'aeiou')} {what} was still open when the program ended, so "
            f"unfinished work was dropped: use it inside `with`"
        )
        close()
