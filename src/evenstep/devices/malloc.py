"""Memory that one step frees is kept for the next, instead of going back to the system.

A training step allocates the same tensors again and again. glibc gives large ones back to the
kernel when they are freed and has their pages mapped and zeroed anew each time, which took up to a
third of a small network's step on a CPU, and more when several lanes of one process wait for its
page tables. No bits are moved: torch aligns every tensor to 64 bytes either way.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# malloc.h of the GNU C library: the parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_IN_HEAP_NBYTES = 32 << 20  # what glibc's own adaptation stops at
_GROW_HEAP_BY_NBYTES = 64 << 20
_NEVER = 2**31 - 1


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the process while it is open; then give it back to the system.

    Threads that start from now on share one arena, so that what one lane frees, another can use.

    Does nothing but where malloc is glibc's. The settings are the process's: afterwards they are
    what glibc's own adaptation tends to (its thresholds can't be read, so not what they were); the
    one arena stays.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP_NBYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    libc.mallopt(_M_TOP_PAD, _GROW_HEAP_BY_NBYTES)
    libc.mallopt(_M_ARENA_MAX, 1)
    try:
        yield
    finally:
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_IN_HEAP_NBYTES)
        libc.mallopt(_M_TOP_PAD, 128 << 10)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None
