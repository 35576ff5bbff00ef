"""Changes of the whole process that last while anyone needs them, and are undone after the last."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


def process_wide(
    change: Callable[[], AbstractContextManager[object]],
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager like `change` that may be open several times at once.

    Its contexts may be nested, and may overlap in several threads: the first one to open enters
    `change`, and the last one to close leaves it.
    """
    lock = threading.RLock()  # the collector's destructors may open a trainer
    entered = ExitStack()
    users = 0

    @functools.wraps(change)
    @contextmanager
    def opened() -> Iterator[None]:
        nonlocal users
        with lock:
            if not users:
                entered.enter_context(change())
            users += 1
        try:
            yield
        finally:
            with lock:
                users -= 1
                if not users:
                    entered.close()

    return opened


@process_wide
@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python look for no unreachable cycles of objects while the context is open.

    It looks whenever many objects have been made, through all that the process has: 0.15 s with
    torch, several times while copies of a large model are made and dropped.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_INTERVAL_S = 1e-4


@process_wide
@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let Python's threads take turns sooner while the context is open: every 0.1 ms.

    A thread whose kernel has finished needs Python's global lock to start the next one. It waits
    for Python's switch interval, 5 ms by default, before it asks the thread that has the lock to
    release it, and a whole forward pass of a shard may take less than that. A shorter interval
    stays; at the end the earlier one is restored, unless another one was set meanwhile.
    """
    earlier_s = sys.getswitchinterval()
    sys.setswitchinterval(min(earlier_s, _INTERVAL_S))
    chosen_s = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == chosen_s:
            sys.setswitchinterval(earlier_s)
