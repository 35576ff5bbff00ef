"""Keeps memory that a training step frees for the next step, instead of returning it to the system.

A training step allocates the same tensors again and again. glibc returns large blocks to the kernel
when they are freed; the next step then maps and zeroes the same number of pages again. This took up
to a third of a small network's step on a CPU, and more with several lanes, which wait for each
other at the process's page tables. Results do not change: torch aligns tensors to 64 bytes itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from evenstep.devices.process_wide import process_wide

# mallopt(3), and malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_IN_HEAP_NBYTES = 32 << 20  # the upper limit of glibc's own adaptation
# With more padding, a larger block may find room at the top of the heap, where it stays when freed.
_WHILE_OPEN = {
    _M_MMAP_THRESHOLD: _LARGEST_IN_HEAP_NBYTES,
    _M_TRIM_THRESHOLD: 2**31 - 1,
    _M_TOP_PAD: _LARGEST_IN_HEAP_NBYTES,
    _M_ARENA_MAX: 1,
}
_AFTERWARDS = {
    _M_TRIM_THRESHOLD: 2 * _LARGEST_IN_HEAP_NBYTES,
    _M_TOP_PAD: 128 << 10,
    _M_ARENA_MAX: 8 * (os.cpu_count() or 1),
}


def kept_memory(enabled: bool = True) -> AbstractContextManager[None]:
    """Return a context that keeps freed memory in the process, and returns it at the end.

    Threads that start meanwhile share one arena, so that one lane can reuse what another has freed.
    Contexts may be nested and may overlap in several threads: the first one to open changes the
    parameters of malloc, and the last one to close restores them.

    glibc does not allow to undo everything. After the first use in a process:

    * Its dynamic adaptation of the mmap and trim thresholds stays off. They stay at 32 MiB and
      64 MiB, the limits that the adaptation approaches in a process that frees large tensors. (With
      the initial 128 KiB and no adaptation, every larger tensor would be mapped anew.)
    * The limit of one arena stays in force if a thread was started meanwhile, because glibc
      evaluates it only once. Threads that start later share the existing arenas.

    Does nothing if `enabled` is false, or if malloc is not glibc's.
    """
    return _kept_memory() if enabled else nullcontext()


@process_wide
@contextmanager
def _kept_memory() -> Iterator[None]:
    libc = _glibc()
    if libc is None:
        yield
        return
    _apply(libc, _WHILE_OPEN)
    try:
        yield
    finally:
        _apply(libc, _AFTERWARDS)
        libc.malloc_trim(0)


def _apply(libc: ctypes.CDLL, parameters: dict[int, int]) -> None:
    for parameter, value in parameters.items():
        libc.mallopt(parameter, value)


def _glibc() -> ctypes.CDLL | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # of a Python that is linked statically, or on Windows
        return None
    return libc if hasattr(libc, "mallopt") else None
