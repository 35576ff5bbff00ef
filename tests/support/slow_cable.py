"""A cable between two machines that takes its time and loses packets: what `tc netem` would do.

Not every kernel has netem. Here a thread carries the Ethernet frames between two TAP devices, one
on each machine.
"""

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import threading
import time

import pytest

from machines import ip

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 1 << 16


class SlowCable:
    """Carries frames both ways, each `delay_s` late, and loses a share of them.

    Attributes:
        carried, lost: how many frames so far.
    """

    def __init__(self, ends, delay_s, loss):
        self.carried = self.lost = 0
        self._other = dict(zip(ends, reversed(ends), strict=True))
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(0)
        self._on_the_way = collections.deque()  # (when, to which end, the frame), the oldest first
        self._stop, self._stopper = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="slow cable")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        os.close(self._stopper)
        self._thread.join()
        os.close(self._stop)

    def _carry(self):
        while True:
            now = time.monotonic()
            while self._on_the_way and self._on_the_way[0][0] <= now:
                _, end, frame = self._on_the_way.popleft()
                with contextlib.suppress(OSError):  # that side's interface is down
                    os.write(end, frame)
            wait_s = self._on_the_way[0][0] - now if self._on_the_way else None
            ready, _, _ = select.select([*self._other, self._stop], [], [], wait_s)
            if self._stop in ready:
                return
            for end in ready:
                self._take(end)

    def _take(self, end):
        try:
            frame = os.read(end, _FRAME_BYTES)
        except OSError:  # its interface is gone
            return
        if self._random.random() < self._loss:
            self.lost += 1
            return
        self.carried += 1
        self._on_the_way.append((time.monotonic() + self._delay_s, self._other[end], frame))


@contextlib.contextmanager
def slow_cable(machines, addresses, *, delay_s, loss):
    """Give each machine a second interface, `slow0`, with an address; the cable is between them."""
    with contextlib.ExitStack() as opened:
        ends = []
        for number, (machine, address) in enumerate(zip(machines, addresses, strict=True)):
            end = _tap(f"evenstep{number}")
            opened.callback(os.close, end)
            ip("link", "set", f"evenstep{number}", "netns", machine, "name", "slow0")
            ip("-n", machine, "addr", "add", f"{address}/24", "dev", "slow0")
            ip("-n", machine, "link", "set", "slow0", "up")
            ends.append(end)
        yield opened.enter_context(SlowCable(ends, delay_s, loss))


def _tap(name):
    """Make a TAP interface and return the file that its frames are read from and written to."""
    try:
        handle = os.open(_TUN, os.O_RDWR)
        fcntl.ioctl(
            handle, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
        )
    except OSError as error:
        pytest.skip(f"TAP devices are not permitted here: {error}")
    return handle
