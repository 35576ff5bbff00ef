"""Signals such as Ctrl-C, kept out of code that must run as a whole.

Python runs signal handlers in the main thread, between any two instructions, and most of them
raise an exception there. While a trainer or an engine is open, evenstep's own handlers replace
them. They look at the stack of the main thread: if a `shielded` function is on it, the signal is
only recorded. It is passed to the user's handler where an exception leaves nothing half done: in a
wait (`check`), or when the call ends (`deliver`). User code that a shielded function calls is
`interruptible` again.

Why the stack, and not a flag: a signal may arrive just before a flag is set or just after it was
reset. The stack is right at every moment.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Handler: TypeAlias = "Callable[[int, FrameType | None], object]"

POLL_S = 0.1
"""The longest time, in seconds, until a wait notices a signal."""

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGBREAK")
_NUMBERS = [number for name in _NAMES if (number := getattr(signal, name, None)) is not None]


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = function.__code__
    return code


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class Interrupts:
    """The signals of the process that end a program, or ask it to end.

    Attributes:
        pending: the signals that were recorded, and the user's handler of each.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Handler] = {}
        self._is_shielded: dict[CodeType, bool] = {}
        self._opened = 0

    # ---- marks of functions

    def shielded(self, function: Callable[P, R]) -> Callable[P, R]:
        """Record signals while `function` runs in the main thread; its caller must `deliver`."""
        self._is_shielded[_code(function)] = True
        return function

    def interruptible(self, function: Callable[P, R]) -> Callable[P, R]:
        """Let signals through while `function` runs, also if a shielded function has called it."""
        self._is_shielded[_code(function)] = False
        return function

    def uninterrupted(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, shielded, with signals delivered at its end."""
        self.shielded(function)

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            try:
                return function(*arguments, **options)
            finally:
                self.deliver()

        return call

    # ---- recorded signals

    @property
    def has_come(self) -> bool:
        """Whether a signal was recorded; always false outside the main thread."""
        return bool(self.pending) and _is_main()

    def check(self) -> None:
        """In the main thread, call the user's handlers of recorded signals; they may raise."""
        while self.pending and _is_main():
            number, handler = self.pending.popitem()
            handler(number, sys._getframe(1))

    def deliver(self) -> None:
        """Call `check`, unless the caller runs in a shielded function, which delivers later."""
        if self.pending and not self._shields(sys._getframe(2)):
            self.check()

    # ---- handlers

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Inside `with`, replace the user's handlers; the last block that ends restores them.

        Only the main thread can do that. If the block ends in another thread, evenstep's handlers
        stay, and forward signals to those that they replaced.
        """
        if not _is_main():
            yield
            return
        try:
            self._opened += 1
            self.follow()
            yield
        finally:
            self._opened -= 1
            if not self._opened and _is_main():
                self._restore()

    def follow(self) -> None:
        """Replace handlers that the user has installed meanwhile, if `handled` is open."""
        if not self._opened or not _is_main():
            return
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, _Recorder):
                signal.signal(number, _Recorder(self, handler))

    def _restore(self) -> None:
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if isinstance(handler, _Recorder):
                signal.signal(number, handler.replaced)

    def on_signal(self, number: int, frame: FrameType | None, handler: Handler) -> None:
        """Record a signal, or hand it to the user's handler at once."""
        if self._shields(frame):
            self.pending[number] = handler
        else:
            self.pending.pop(number, None)  # a signal that comes again counts once
            handler(number, frame)

    def _shields(self, frame: FrameType | None) -> bool:
        """Return what the innermost marked function on the stack says."""
        while frame is not None:
            found = self._is_shielded.get(frame.f_code)
            if found is not None:
                return found
            frame = frame.f_back
        return False


class _Recorder:
    """The handler that replaces one of the user's.

    Args:
        replaced: the user's handler.
    """

    def __init__(self, interrupts: Interrupts, replaced: Handler) -> None:
        self._interrupts = interrupts
        self.replaced = replaced

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._interrupts.on_signal(number, frame, self.replaced)


INTERRUPTS = Interrupts()
"""The signals of this process, which has one handler for each and one main thread."""


@INTERRUPTS.interruptible
def interruptible(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Return `function(*arguments)`; a signal may interrupt it anywhere."""
    return function(*arguments, **options)
