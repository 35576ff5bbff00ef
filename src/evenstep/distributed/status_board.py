"""A board where each process says what it is doing, for others to read when it does not come."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_GRACE_S = 2.0  # for a store that may be gone, whose own time limit is long


class Board:
    """Writes this process's note to a store, a few times a second, and reads the others'.

    Inside `with` a thread does the writing, so that `note` costs nothing.

    Args:
        store: that all processes share.
        rank: this process's.
        every_s: seconds between two looks at the note.
    """

    def __init__(self, store: Store, rank: int, every_s: float = 0.25) -> None:
        self._store = store
        self._rank = rank
        self._every_s = every_s
        self._doing = "starting"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Board:
        """Start writing."""
        self._thread = threading.Thread(target=self._write, name="evenstep board", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop writing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    def note(self, doing: str) -> None:
        """Say what this process is doing from now on."""
        self._doing = doing

    def leave(self, story: str) -> None:
        """Say why this process is about to be gone."""
        self._in_time(lambda: self._store.set(f"left/{self._rank}", story))

    def word_of(self, rank: int) -> tuple[str | None, str]:
        """Return why a process has left, if it has said so, and what it was last seen doing."""
        unknown = (None, "and the launcher's store, which would know what it did, does not answer")
        return self._in_time(lambda: self._look(rank)) or unknown

    def _look(self, rank: int) -> tuple[str | None, str]:
        if self._store.check([f"left/{rank}"]):
            return str(self._store.get(f"left/{rank}"), "utf-8", "replace"), ""
        if not self._store.check([f"doing/{rank}"]):
            return None, "never seen"
        seen = json.loads(self._store.get(f"doing/{rank}"))
        return None, f"last seen {max(0.0, time.time() - seen['at']):.0f} s ago, {seen['doing']}"

    def _in_time(self, function: Callable[[], T]) -> T | None:
        """Return `function()`, which asks the store; None if it doesn't answer in a short while."""
        answers: list[T] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                answers.append(function())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_GRACE_S)
        return answers[0] if answers else None

    def _write(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: others will notice
            while True:
                seen = {"at": time.time(), "doing": self._doing}
                self._store.set(f"doing/{self._rank}", json.dumps(seen))
                if self._ended.wait(self._every_s):
                    return
