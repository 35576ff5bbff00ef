"""Changes of the whole process that last while anyone needs them, and are undone after the last."""

from __future__ import annotations

import functools
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
