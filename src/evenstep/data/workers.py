"""Worker processes of a loader: what is said where one ends too early."""

from __future__ import annotations

import traceback

_CONNECTIONS = ("multiprocessing", "torch.multiprocessing")
"""What receives a batch: the tensors of it come through a socket of the worker's."""


def refuse_half_a_batch(error: OSError | EOFError, loader: str) -> None:
    """Say that a worker has ended, if that is why a batch could not be received.

    A worker closes its socket a moment before its process has ended, and torch, which looks for
    the process, then raises what the socket gave: "No such file or directory".

    Raises:
        RuntimeError: a worker has ended, as torch says it of one that ended a moment earlier.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    if module.startswith(tuple(f"{package}." for package in _CONNECTIONS)):
        raise RuntimeError(
            f"a worker process of the {loader} ended while it handed over a batch (its own "
            f"message, if it has printed one, says why)"
        ) from error
