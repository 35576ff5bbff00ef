"""Makes Python's threads take turns sooner while lanes run.

A thread whose kernel has finished needs Python's global lock to start the next one. It waits for
Python's switch interval, 5 ms by default, before it asks the thread that has the lock to release
it, and a whole forward pass of a shard may take less than that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from evenstep.devices.process_wide import process_wide

_INTERVAL_S = 1e-4


@process_wide
@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Use a switch interval of 0.1 ms while the context is open, unless it is shorter already.

    At the end the earlier one is restored, unless another one was set meanwhile.
    """
    earlier_s = sys.getswitchinterval()
    sys.setswitchinterval(min(earlier_s, _INTERVAL_S))
    chosen_s = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == chosen_s:
            sys.setswitchinterval(earlier_s)
