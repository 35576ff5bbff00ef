"""Worker processes of a loader: what they get, and what is said where one ends too early."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import torch

_CONNECTIONS = ("multiprocessing", "torch.multiprocessing")
"""What receives a batch: the tensors of it come through a socket of the worker's."""


def let_generators_pass() -> None:
    """Let processes that aren't forked get torch's generators, as from Python 3.14 on by default.

    Torch hands over a generator's state in shared memory, which it closes before the process opens
    it, with "unable to resize file" (seen with torch 2.13 and 2.15). Here it goes as bytes.
    """
    ForkingPickler.register(torch.Generator, _to_bytes)


def _to_bytes(generator: torch.Generator) -> tuple[Callable[..., object], tuple[str, bytes]]:
    return _from_bytes, (str(generator.device), generator.get_state().numpy().tobytes())


def _from_bytes(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


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
