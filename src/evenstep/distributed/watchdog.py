"""Ends a process whose launcher was killed, so that it does not train on unsupervised."""

from __future__ import annotations

import os
import signal
import threading

_EVERY_S = 0.5


class LauncherWatch:
    """Inside `with`, a thread watches the launcher and sends this process SIGTERM when it ends.

    A launcher that ends in order sends SIGTERM too. On SIGTERM the command line saves a checkpoint,
    and a plain script ends.
    """

    def __init__(self) -> None:
        self._launcher = os.getppid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evenstep launcher watch")
        self._thread.daemon = True

    def __enter__(self) -> LauncherWatch:
        """Start watching."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            if os.getppid() != self._launcher:  # an orphan has a different parent
                os.kill(os.getpid(), signal.SIGTERM)
                return
