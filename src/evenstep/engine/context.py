"""What torch keeps for each thread, taken where a task is submitted and put back where it runs.

Torch's modes (grad mode, autocast) belong to a thread. A task runs in another thread than the one
that submitted it, but must compute what it would have computed there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

_AUTOCAST_KINDS = ("cpu", "cuda")


class Modes(NamedTuple):
    """The modes of a thread that change what an op does.

    Attributes:
        grad: whether ops are recorded for the backward pass.
        inference: whether inference mode is on.
        autocast: for the CPU and CUDA, the dtype that autocast computes in; None if it is off.
    """

    grad: bool
    inference: bool
    autocast: tuple[torch.dtype | None, ...]


def current_modes() -> Modes:
    """Return the modes of the calling thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    on_cpu, on_cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    if grad and not (inference or on_cpu or on_cuda):
        return PLAIN
    cpu = torch.get_autocast_dtype("cpu") if on_cpu else None
    return Modes(grad, inference, (cpu, torch.get_autocast_dtype("cuda") if on_cuda else None))


@contextlib.contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Put the calling thread into `modes`, whatever it is in, and back at the end.

    Autocast's cache of cast weights belongs to the process, and the end of autocast in one thread
    clears it for all, so it stays off.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for kind, dtype in zip(_AUTOCAST_KINDS, modes.autocast, strict=True):
            if dtype is not None:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


PLAIN = Modes(grad=True, inference=False, autocast=(None,) * len(_AUTOCAST_KINDS))
"""The modes of a new thread."""
