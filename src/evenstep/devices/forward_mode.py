"""Forward-mode AD in worker threads: one thread at a time is inside a level of it.

torch has one level for the process (`torch.autograd.forward_ad.dual_level`, and with it
`torch.func.jvp`, `jacfwd`, `hessian`, `linearize`). Of two threads inside, the first to leave takes
the other one's tangents away.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import forward_ad

from evenstep.devices.process_wide import process_wide
from evenstep.errors import ContractError
from evenstep.private_torch.compilers import level_of, transforms

_ENTRIES = [
    (forward_ad, "enter_dual_level", "exit_dual_level"),
    (transforms, "enter_jvp_nesting", "exit_jvp_nesting"),
]

# Module-level state, because torch has one level for the process.
_INSIDE = threading.RLock()


@process_wide
@contextlib.contextmanager
def one_level_at_a_time() -> Iterator[None]:
    """Inside `with`, a thread that enters a level waits until the others have left theirs."""
    before = [
        (module, name, getattr(module, name)) for module, *names in _ENTRIES for name in names
    ]
    for module, enter, leave in _ENTRIES:
        setattr(module, enter, functools.partial(_enter, getattr(module, enter)))
        setattr(module, leave, functools.partial(_leave, getattr(module, leave)))
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _enter(enter: Callable[[], int]) -> int:
    _INSIDE.acquire()
    try:
        return enter()
    except BaseException:
        _INSIDE.release()
        raise


def _leave(leave: Callable[..., None], **level: Any) -> None:
    try:
        leave(**level)
    finally:
        with contextlib.suppress(RuntimeError):  # entered before a trainer was opened
            _INSIDE.release()


def refuse_inside_a_level(what: str) -> None:
    """Refuse to wait for other threads, which may want a level, from inside of one.

    Args:
        what: what the caller is about to do, for the message.

    Raises:
        ContractError: the calling thread is inside a level.
    """
    if level_of(forward_ad) >= 0 and _INSIDE.acquire(blocking=False):
        is_inside = level_of(forward_ad) >= 0
        _INSIDE.release()
        if is_inside:
            raise ContractError(
                f"a level of forward-mode AD (torch.func.jvp, jacfwd, hessian, dual_level) is open "
                f"around {what}, but torch has one level for all threads: enter it inside the "
                f"objective, and leave it before anything that waits for other shards. "
                f"torch.autograd.functional.jvp and torch.func.jacrev have no level"
            )
