"""Lanes: the worker threads of the devices, each of which makes one call at a time.

A lane calls what `put` gives it, in that order, with its own number; it decides nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from evenstep.devices import Device
from evenstep.engine.task import PLAIN, in_modes

_GRACE_S = 0.2  # for the thread of a lost lane to end, if it still can

Work: TypeAlias = "Callable[[int], object]"
"""Called in a lane with the lane's number; it must not raise."""


class Lanes(Protocol):
    """What the engine needs of its lanes: two for each device, the second one for copies."""

    def open(self) -> None:
        """Start the lanes."""
        ...

    def put(self, lane: int, work: Work) -> None:
        """Call `work(lane)` in the lane, after what was put there before."""
        ...

    def work(self) -> None:
        """Carry out what was put, if the lanes have no threads of their own for it."""
        ...

    def close(self, lost: set[int]) -> None:
        """Stop, and wait for the end of every lane but the `lost` ones, which may never end."""
        ...

    @property
    def inside(self) -> bool:
        """Whether the caller is a task, which must not wait for others."""
        ...

    @property
    def here(self) -> int:
        """The lane of the calling task."""
        ...

    @property
    def side_by_side(self) -> bool:
        """Whether tasks of several lanes run at the same time, and may wait for each other."""
        ...

    def adopt(self, lane: int) -> None:
        """Make the calling thread, which a task has started, one of that lane's."""
        ...


class ThreadLanes:
    """Lanes with a thread each; the threads live from `open` to `close`."""

    side_by_side = True

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._inboxes: list[queue.SimpleQueue[Work | None]] = []
        self._threads: list[threading.Thread] = []
        self._here = threading.local()

    def open(self) -> None:
        """Start a computing and a copying thread for each device."""
        torch.get_num_threads()  # settle the caller's own number before the lanes set theirs
        roles = [(device, f"evenstep {device}") for device in self.devices]
        roles += [(device, f"evenstep copy {device}") for device in self.devices]
        self._inboxes = [queue.SimpleQueue() for _ in roles]
        self._threads = [
            threading.Thread(target=self._work, args=(lane, *role), daemon=True)
            for lane, role in enumerate(roles)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, lane: int, work: Work) -> None:
        """Give a lane its next call."""
        self._inboxes[lane].put(work)

    def work(self) -> None:
        """Nothing to do: the threads are at work."""

    def close(self, lost: set[int]) -> None:
        """Stop every thread, and wait for its end."""
        for inbox in self._inboxes:
            inbox.put(None)
        for lane, thread in enumerate(self._threads):
            thread.join(_GRACE_S if lane in lost else None)
        self._inboxes, self._threads = [], []

    @property
    def inside(self) -> bool:
        """Whether the calling thread is one of the lanes."""
        return hasattr(self._here, "lane")

    @property
    def here(self) -> int:
        """The lane of the calling thread."""
        lane: int = self._here.lane
        return lane

    def adopt(self, lane: int) -> None:
        """Let the calling thread compute as the lane's own thread does."""
        self._here.lane = lane
        _settle_threads(self.devices[lane].threads)

    def _work(self, lane: int, device: Device, name: str) -> None:
        threading.current_thread().name = name
        self._here.lane = lane
        _settle_threads(device.threads)
        inbox = self._inboxes[lane]
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)
            torch.cuda.set_stream(torch.cuda.Stream(device.index))
        while (work := inbox.get()) is not None:
            work(lane)
            del work  # an idle lane must not keep a step's tensors alive


class InlineLanes:
    """Lanes without threads: a task runs in the thread that submits it, before `submit` returns.

    A real stand-in: the same results with nothing beside anything else, for tests and debuggers.

    Attributes:
        here: the lane of the task that runs.
    """

    side_by_side = False

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._todo: deque[tuple[int, Work]] = deque()
        self._at_work = False
        self.here = -1

    def open(self) -> None:
        """Nothing to start."""

    def put(self, lane: int, work: Work) -> None:
        """Keep the call for `work`."""
        self._todo.append((lane, work))

    def work(self) -> None:
        """Run what was put, and what that starts, one after the other."""
        if self._at_work or not self._todo:
            return
        self._at_work = True
        before = torch.get_num_threads()
        try:
            with in_modes(PLAIN):  # those of a lane; and what a task leaves behind is put back
                while self._todo:
                    lane, work = self._todo.popleft()
                    self.here = lane
                    torch.set_num_threads(self.devices[lane % len(self.devices)].threads)
                    work(lane)
        finally:
            self._at_work = False
            torch.set_num_threads(before)

    def close(self, lost: set[int]) -> None:
        """Nothing to stop."""

    def adopt(self, lane: int) -> None:
        """Let the calling thread compute as a task of that lane does."""
        _settle_threads(self.devices[lane].threads)

    @property
    def inside(self) -> bool:
        """Whether a task runs."""
        return self._at_work


def _settle_threads(threads: int) -> None:
    """Let torch use `threads` threads in this new thread, whatever other threads ask for later.

    At its first use of torch a thread takes the number that any thread has set last, even over its
    own: so the first use comes before the setting.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)
