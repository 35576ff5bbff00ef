"""A status board, on which each process publishes what it is doing, for errors of the others."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from evenstep.distributed.secret import SealedStore
    from evenstep.private_torch.processes import Store

T = TypeVar("T")

_EVERY_S = 0.25
_GRACE_S = 2.0  # the store's own time limit is much longer, and the store may be gone


class StatusBoard:
    """Publishes this process's status in a store, and reads the status of other processes.

    Inside `with`, a thread publishes the status a few times a second; `note` itself costs nothing.
    All processes share the store.
    """

    def __init__(self, store: Store | SealedStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._doing = "starting"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StatusBoard:
        """Publish the status, and start to do so again and again."""
        with contextlib.suppress(RuntimeError):
            self._publish()  # a process that ends before its thread runs has been seen, too
        name = "evenstep status board"
        self._thread = threading.Thread(target=self._keep_publishing, name=name, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop publishing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    def note(self, doing: str) -> None:
        """Set what this process is doing."""
        self._doing = doing

    def leave(self, reason: str) -> None:
        """Publish why this process ends."""
        self._in_time(lambda: self._store.set(f"left/{self._rank}", reason))

    def status_of(self, rank: int) -> tuple[str | None, str]:
        """Return why a process has left, if it published that, and its last known status."""
        why = "the launcher's store does not respond, or holds what no process of the job wrote"
        unknown = (None, f"and its status is unknown: {why}")
        return self._in_time(lambda: self._look_up(rank)) or unknown

    def _look_up(self, rank: int) -> tuple[str | None, str]:
        if self._store.check([f"left/{rank}"]):
            return str(self._store.get(f"left/{rank}"), "utf-8", "replace"), ""
        if not self._store.check([f"doing/{rank}"]):
            return None, "never seen"
        seen = json.loads(self._store.get(f"doing/{rank}"))
        return None, f"last seen {max(0.0, time.time() - seen['at']):.0f} s ago, {seen['doing']}"

    def _in_time(self, function: Callable[[], T]) -> T | None:
        """Return `function()`, which asks the store; None if the store doesn't respond soon."""
        answers: list[T] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError, ValueError):
                answers.append(function())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_GRACE_S)
        return answers[0] if answers else None

    def _keep_publishing(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone; the main thread will notice
            while not self._ended.wait(_EVERY_S):
                self._publish()

    def _publish(self) -> None:
        seen = {"at": time.time(), "doing": self._doing}
        self._store.set(f"doing/{self._rank}", json.dumps(seen))
