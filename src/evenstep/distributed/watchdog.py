"""A process whose launcher is gone must not train on: nobody would know."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType


class LauncherWatch:
    """Inside `with`, a thread looks whether the launcher lives; if not, it sends SIGTERM here.

    A launcher that ends in order does so too: the command line then saves, a plain script ends.
    """

    def __init__(self, every_s: float = 0.5) -> None:
        self._every_s = every_s
        self._launcher = os.getppid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evenstep launcher watch")
        self._thread.daemon = True

    def __enter__(self) -> LauncherWatch:
        """Start watching."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            if os.getppid() != self._launcher:  # an orphan has another parent
                os.kill(os.getpid(), signal.SIGTERM)
                return
