"""Writes checkpoints while training continues, in one worker thread."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from evenstep.checkpoint.codec import Encoded, encode
from evenstep.checkpoint.files import write_checkpoint
from evenstep.checkpoint.fingerprint import digest_of
from evenstep.checkpoint.training_state import TrainingState, with_fingerprint
from evenstep.devices.addresses import row_major
from evenstep.engine.interrupts import INTERRUPTS, POLL_S
from evenstep.errors import add_note

Entries = Iterable[tuple[str, Any]]
"""What the fingerprint covers, as `named_state` yields it."""


def write_state(folder: Path, state: TrainingState, entries: Entries, keep: int) -> Path:
    """Write a training state with the fingerprint of `entries` (see `write_checkpoint`)."""
    return _write(folder, encode(state.to_tree()), entries, state.steps_done, keep)


class AsyncWriter:
    """Inside `with`, writes one checkpoint at a time in a worker thread.

    Attributes:
        pending: the checkpoint that is being written, or whose error was not raised yet.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self.pending: Future[Path] | None = None

    def __enter__(self) -> AsyncWriter:
        # More intra-op threads would compete with the devices for the cores.
        self._thread = ThreadPoolExecutor(1, "evenstep save", torch.set_num_threads, (1,))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait for the disk. Raise the writer's error, or add it to one that is being raised."""
        assert self._thread is not None
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            add_note(error, f"besides, {failure}")
        finally:  # after Ctrl-C, the writer goes on until the interpreter exits
            self._thread.shutdown(wait=self.pending is None)
            self._thread = None

    @property
    def is_open(self) -> bool:
        """Whether it can write."""
        return self._thread is not None

    def start(self, folder: Path, state: TrainingState, entries: Entries, keep: int) -> None:
        """Copy a training state, and start writing the copy (see `write_state`).

        Raises:
            CheckpointError: the state holds something that can't be saved.
            the error of the checkpoint before, which is waited for.
        """
        assert self._thread is not None
        self.wait()
        copies = _Copies()
        encoded = encode(state.to_tree(), copies)
        entries = [(name, copies.of(value)) for name, value in entries]
        step = state.steps_done
        self._submit(self._thread, folder, encoded, entries, step, keep)

    @INTERRUPTS.uninterrupted
    def _submit(self, thread: ThreadPoolExecutor, *given: Any) -> None:
        while self.pending is not None:  # again, if a handler of a signal has saved meanwhile
            self.wait()
        self.pending = thread.submit(_write, *given)

    def check(self) -> None:
        """Raise the writer's error, if it has failed."""
        if self.pending is not None and self.pending.done():
            self.wait()

    @INTERRUPTS.uninterrupted
    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; raise the writer's error."""
        written = self.pending
        if written is None:
            return
        while not wait([written], POLL_S).done:
            if INTERRUPTS.pending:
                INTERRUPTS.check()
        if self.pending is written:  # else a handler of a signal has waited for it
            self.pending = None
            written.result()


class _Copies:
    """Copies tensors as `row_major` does, each tensor only once, into memory of its own."""

    def __init__(self) -> None:
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        key = (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        if key not in self._copies:
            plain = row_major(tensor)
            is_same = plain.data_ptr() == tensor.data_ptr()
            self._copies[key] = plain.clone() if is_same else plain
        return self._copies[key]

    def of(self, value: Any) -> Any:
        return self(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _write(folder: Path, encoded: Encoded, entries: Entries, step: int, keep: int) -> Path:
    sealed = with_fingerprint(encoded, digest_of(entries))
    return write_checkpoint(folder, sealed, step=step, keep=keep)
