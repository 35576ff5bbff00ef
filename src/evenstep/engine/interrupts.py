"""Signals such as Ctrl-C, kept out of code that must run as a whole.

Python runs signal handlers in the main thread, between any two instructions. They raise an
exception there, or save the training. While a trainer or an engine is open, evenstep's own handlers
replace all that are Python code. They look at the stack of the main thread: if a `shielded`
function is on it, the signal is only recorded. It is passed to the user's handler where an
exception, or a call of the trainer, finds nothing half done: in a wait (`check`), or when the call
ends (`deliver`). User code that a shielded function calls is `interruptible` again.

Why the stack, and not a flag: a signal may arrive just before a flag is set or just after it was
reset. The stack is right at every moment.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar

from evenstep.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

Handler: TypeAlias = "Callable[[int, FrameType | None], object]"

POLL_S = 0.1
"""The longest time, in seconds, until a wait notices a signal."""

SIGNALS = sorted(map(int, signal.valid_signals()))
"""The numbers of all signals."""
handler_of: Callable[[int], object] = _signal.getsignal
"""Returns the handler of a signal; `signal.getsignal` takes 1 µs to spell it."""
_CALLS = {
    "__enter__": "open",
    "__exit__": "close",
    "wait_until": "float(loss)",
    "wrapper": "optimizer.step",
}


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = function.__code__
    return code


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class Interrupts:
    """The signals of the process whose handlers are Python code.

    Attributes:
        pending: the signals that were recorded, and the user's handler of each.
        is_handling: whether a handler may be running (`interrupted_call` knows for sure).
        known: the handlers of `SIGNALS` when `follow` was called last.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Handler] = {}
        self.is_handling = False
        self._is_shielded: dict[CodeType, bool] = {_code(Interrupts._handle): False}
        self._holds = 0
        self._open = set[object]()  # the blocks of `handled`
        self.known: list[object] = []

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
    def ctrl_c_has_come(self) -> bool:
        """Whether Ctrl-C was recorded; always false outside the main thread."""
        return signal.SIGINT in self.pending and _is_main()

    def check(self) -> None:
        """In the main thread, call the user's handlers of recorded signals; they may raise.

        At any of these lines, another signal may be recorded, or one of these be handled.
        """
        while self.pending and _is_main():
            recorded = [*self.pending.items()]
            ready = [number for number, handler in recorded if self._may_run(handler)]
            if not ready:
                return
            handler = self.pending.pop(ready[0], None)
            if handler is not None:
                self._handle(handler, ready[0], sys._getframe(1))

    def deliver(self, beyond: int = 1) -> None:
        """Call `check`, unless a shielded function has called the caller: it delivers later.

        Args:
            beyond: the innermost frames that don't count: the caller's, and perhaps its caller's.
        """
        if self.pending and not self._shields(sys._getframe(1 + beyond)):
            self.check()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside `with`, waits call no handler but Python's own for Ctrl-C, which only raises.

        Any other might save a state that lies between two steps.
        """
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def _may_run(self, handler: Handler) -> bool:
        return not self._holds or handler is signal.default_int_handler

    def _handle(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Call a handler of the user's, which may itself be interrupted."""
        outer, self.is_handling = self.is_handling, True
        try:
            handler(number, frame)
        finally:
            self.is_handling = outer

    # ---- calls of handlers

    @property
    def handler_runs(self) -> bool:
        """Whether a handler runs, and has called the caller."""
        return self.is_handling and self._interrupted() is not None

    def _interrupted(self) -> str | None:
        """Return the shielded call that a running handler has interrupted; "" if there was none."""
        frame: FrameType | None = sys._getframe(1)
        name = None
        while frame is not None:
            if frame.f_code is _code(Interrupts._handle):
                name = name or ""
            elif name is not None and self._is_shielded.get(frame.f_code):
                name = frame.f_code.co_name
            frame = frame.f_back
        return name and _CALLS.get(name, name.strip("_"))

    def refuse_in_handler(self, what: str) -> None:
        """Refuse a call by a handler that has interrupted another call.

        Raises:
            InputError: names both.
        """
        interrupted = self._interrupted() if self.is_handling else None
        if interrupted:
            raise InputError(
                f"a signal handler called {what} in the middle of {interrupted}: set a flag in the "
                f"handler, and call {what} in your loop when the flag is set (a handler may call "
                f"save, waitall and fingerprint anywhere, or raise an exception)"
            )

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
        block = object()
        try:
            self._open.add(block)
            self.follow()
            yield
        finally:
            try:
                self._leave(block)
            except BaseException:  # maybe thrown into this thread, and has cut that off
                self._leave(block)
                raise

    def follow(self) -> None:
        """Replace handlers that the user has installed meanwhile, if `handled` is open."""
        if not self._open or not _is_main():
            return
        for number, handler in zip(SIGNALS, [*map(handler_of, SIGNALS)], strict=True):
            if callable(handler) and not isinstance(handler, _Recorder):
                signal.signal(number, _Recorder(self, handler))
        self.known = [*map(handler_of, SIGNALS)]

    def _leave(self, block: object) -> None:
        self._open.discard(block)
        if self._open or not _is_main():
            return
        for number in SIGNALS:
            handler = handler_of(number)
            if isinstance(handler, _Recorder):
                signal.signal(number, handler.replaced)
        self.known = []

    def on_signal(self, number: int, frame: FrameType | None, handler: Handler) -> None:
        """Record a signal, or hand it to the user's handler at once."""
        if self._shields(frame):
            self.pending[number] = handler
        else:
            self.pending.pop(number, None)  # a signal that comes again counts once
            self._handle(handler, number, frame)

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
