"""Checkpoints on their way to the disk, while training goes on.

The state is copied at once; a thread of its own hashes the copy and writes it. There is one such
thread, so one checkpoint after the other.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.files import write_checkpoint
from evenstep.checkpoint.fingerprint import digest_of
from evenstep.checkpoint.training_state import Tree
from evenstep.errors import add_note


def write_state(
    folder: Path, tree: Tree, entries: Iterable[tuple[str, Any]], step: int, keep: int
) -> Path:
    """Write a training state under its fingerprint (see `write_checkpoint`).

    Args:
        folder: where the run's checkpoints lie.
        tree: the state, without its fingerprint.
        entries: what the fingerprint is over (see `named_state`).
        step: how many steps led to it.
        keep: how many checkpoints are kept.
    """
    tree = {**tree, "fingerprint": digest_of(entries)}
    return write_checkpoint(folder, tree, step=step, keep=keep)


class Saves:
    """Inside `with`: the checkpoint that is being written, if any.

    Attributes:
        pending: the checkpoint that is being written, or whose error was not raised yet.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self.pending: Future[Path] | None = None

    def __enter__(self) -> Saves:
        # Threads of its own would fight with the devices for the cores.
        self._thread = ThreadPoolExecutor(1, "evenstep save", torch.set_num_threads, (1,))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the disk; raise the writer's error, or add it to one that is on its way."""
        assert self._thread is not None
        self._thread.shutdown()
        self._thread = None
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            add_note(error, f"besides, {failure}")

    def start(
        self, folder: Path, tree: Tree, entries: Iterable[tuple[str, Any]], step: int, keep: int
    ) -> None:
        """Copy a training state, and have the copy written (see `write_state`).

        Raises:
            CheckpointError: it holds what can't be saved.
            the error of the checkpoint before, which is waited for.
        """
        assert self._thread is not None
        self.wait()
        encode(tree)  # refuses what can't be saved while the caller is there to hear it
        tree, entries = copy.deepcopy((tree, list(entries)))  # memory in both is copied once
        write = functools.partial(write_state, folder, tree, entries, step, keep)
        self.pending = self._thread.submit(write)

    def check(self) -> None:
        """Raise the writer's error, if there is one by now."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; raise the writer's error."""
        written, self.pending = self.pending, None
        if written is not None:
            written.result()
