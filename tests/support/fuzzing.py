"""What a fuzzer may not find: a call that takes long, or much memory."""

import contextlib
import math
import re
import signal
from pathlib import Path

LIMIT_S = 5
LIMIT_MIB = 200


class TooLongError(BaseException):
    """The time is up; no `except Exception` catches it."""


@contextlib.contextmanager
def limited(what, seconds=LIMIT_S):
    """Fail if the block computes for more than `seconds`, or its memory grows by over 200 MiB.

    A block that waits without computing is left to the test's own time limit.
    """

    def on_alarm(*_):
        raise TooLongError(what)

    before_mib = _memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    handler = signal.signal(signal.SIGPROF, on_alarm)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    grown_mib = _memory_mib("VmHWM") - before_mib
    assert grown_mib < LIMIT_MIB, f"{what} took {grown_mib:.0f} MiB"


def _memory_mib(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024


ABSURD_NUMBERS = [
    *(-1, 0, 10**6, 40_000, 100_000, 10**20, 10**26, -(10**29), 10**400),
    *(math.nan, math.inf, -math.inf, 1e300, -0.5, 1.5, True, 2**31, 2**63 - 1, 2**63, 2**64),
]
