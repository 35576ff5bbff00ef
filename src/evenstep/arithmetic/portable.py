"""Portable arithmetic as a context: for trainers, and for code around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from evenstep.arithmetic.native import library
from evenstep.errors import InputError, shown
from evenstep.limits import Arithmetic
from evenstep.private_torch.dispatch import count_dispatch_modes, dispatch_modes

_DENORMAL = 2.0**-140  # below the smallest normal float32, 2⁻¹²⁶

VERSION = 1
"""The version of portable arithmetic. A change that moves a bit of a result raises it."""


def portable_facts() -> dict[str, str]:
    """Return what decides the bits of portable arithmetic, by name."""
    release = torch.__version__.split("+")[0]
    return {"portable arithmetic": f"version {VERSION}", "the version of torch": release}


@contextlib.contextmanager
def portable(seed: int | None = None) -> Iterator[None]:
    """Inside `with`, torch computes with the same bits on every processor.

    It applies to the calling thread's operations on float32 tensors in the memory of CPUs: making a
    model, drawing data, an evaluation, a plain training loop. An operation that has no portable
    kernel is refused by name. A `Trainer` that is made inside computes so in its threads, too, as
    with `Experiment(arithmetic="portable")`.

    Args:
        seed: seeds torch's generator for what is inside; at the end the generator has the state
            that it had before. None: the generator is used as it is.

    Raises:
        InputError: the seed is no integer of at least 0, the C part of evenstep was not compiled
            when it was installed, or the thread flushes denormals to zero.

    Example:
        ```python
        with evenstep.portable(seed=0):
            model = nn.Linear(8, 2)  # the same weights on every processor
        ```
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise InputError(f"got seed={shown(seed)}: give an integer of at least 0, or None")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_mode())
        if seed is not None:
            stack.enter_context(torch.random.fork_rng(devices=()))
            torch.default_generator.manual_seed(seed)
        yield


def within(arithmetic: Arithmetic) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return a function that returns a context in which a thread computes by an arithmetic.

    Raises:
        InputError: the C part of evenstep was not compiled when it was installed, or the thread
            flushes denormals to zero.
    """
    if arithmetic == "torch":
        return contextlib.nullcontext
    library()
    _refuse_flushing()
    return _mode


def is_portable_here() -> bool:
    """Return whether the calling thread computes in portable arithmetic."""
    return count_dispatch_modes() > 0 and any(map(is_portable, dispatch_modes()))


def is_portable(mode: object) -> bool:
    """Return whether a mode of torch is that of portable arithmetic."""
    return getattr(mode, "is_portable", False)


def _refuse_flushing() -> None:
    """Refuse a thread that flushes denormals to zero; threads that it starts inherit that.

    Raises:
        InputError: `torch.set_flush_denormal(True)` was called in it.
    """
    if torch.tensor(_DENORMAL).mul(1.0).item() == 0.0:
        raise InputError(
            "portable arithmetic needs denormals, but this thread flushes them to zero: leave out "
            "torch.set_flush_denormal(True)"
        )


def _mode() -> contextlib.AbstractContextManager[object]:
    """Return the mode. Its module registers all kernels: a second that other trainings need not."""
    from evenstep.arithmetic.mode import PortableMode

    library()
    _refuse_flushing()
    mode: contextlib.AbstractContextManager[object] = PortableMode()  # type: ignore[no-untyped-call]
    return mode
