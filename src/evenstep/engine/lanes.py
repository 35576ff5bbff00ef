"""Lanes: the worker threads of the devices. Each lane makes one call at a time.

A lane makes the calls that `put` queues, in that order. The scheduler makes all decisions.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks

from evenstep.devices import Device
from evenstep.engine.task import PLAIN, in_modes

_GRACE_S = 0.2  # how long `close` waits for the thread of a lost lane, which may never end

Work: TypeAlias = "Callable[[int], object]"
"""Called in a lane with the lane's number; must not raise."""


class Lanes(Protocol):
    """The interface of the engine to its lanes: a computing and a copying lane for each device."""

    def open(self) -> None:
        """Start the lanes."""

    def put(self, lane: int, work: Work) -> None:
        """Queue the call `work(lane)` in that lane."""

    def work(self) -> None:
        """Make the queued calls, if the lanes have no threads of their own."""

    def close(self, lost: set[int]) -> None:
        """Stop all lanes; wait until each has ended, except the `lost` ones."""

    @property
    def inside(self) -> bool:
        """Whether the caller is a task, which must not wait for other tasks."""

    @property
    def here(self) -> int:
        """The lane of the calling task."""

    @property
    def side_by_side(self) -> bool:
        """Whether tasks on several lanes run at the same time, and may wait for each other."""

    def adopt(self, lane: int) -> None:
        """Make the calling thread, which a task has started, compute as a thread of `lane`."""


class ThreadLanes:
    """Lanes with one thread each, from `open` to `close`."""

    side_by_side = True

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._inboxes: list[queue.SimpleQueue[Work | None]] = []
        self._threads: list[threading.Thread] = []
        self._here = threading.local()

    def open(self) -> None:
        """Start a computing and a copying thread for each device."""
        torch.get_num_threads()  # fix the caller's own number before the lanes set theirs
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
        """Queue a call for a lane's thread."""
        self._inboxes[lane].put(work)

    def work(self) -> None:
        """Do nothing: the threads make the calls."""

    def close(self, lost: set[int]) -> None:
        """Stop and join every thread; join those of `lost` lanes for a moment only."""
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
        """Make the calling thread compute as the lane's own thread does."""
        self._here.lane = lane
        _fix_threads(self.devices[lane].threads)

    def _work(self, lane: int, device: Device, name: str) -> None:
        threading.current_thread().name = name
        self._here.lane = lane
        _fix_threads(device.threads)
        inbox = self._inboxes[lane]
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)
            torch.cuda.set_stream(torch.cuda.Stream(device.index))
        while (work := inbox.get()) is not None:
            work(lane)
            del work  # an idle lane must not keep a step's tensors alive


class InlineLanes:
    """Lanes without threads: a task runs in the thread that submits it, before `submit` returns.

    The results are the same, and only one task runs at a time: for tests and debuggers.

    Attributes:
        here: the lane of the running task.
    """

    side_by_side = False

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._queue: deque[tuple[int, Work]] = deque()
        self._is_working = False
        self.here = -1

    def open(self) -> None:
        """Do nothing: there are no threads to start."""

    def put(self, lane: int, work: Work) -> None:
        """Queue the call for `work`."""
        self._queue.append((lane, work))

    def work(self) -> None:
        """Make the queued calls and those that they queue, one after another."""
        if self._is_working or not self._queue:
            return
        self._is_working = True
        before = torch.get_num_threads()
        try:
            with in_modes(PLAIN):  # as in a new thread; undoes what a task leaves behind, too
                while self._queue:
                    lane, work = self._queue.popleft()
                    self.here = lane
                    torch.set_num_threads(self.devices[lane % len(self.devices)].threads)
                    work(lane)
        finally:
            self._is_working = False
            torch.set_num_threads(before)

    def close(self, lost: set[int]) -> None:
        """Do nothing: there are no threads to stop."""

    def adopt(self, lane: int) -> None:
        """Make the calling thread compute as a task of that lane does."""
        _fix_threads(self.devices[lane].threads)

    @property
    def inside(self) -> bool:
        """Whether a task is running."""
        return self._is_working


def has_own_modes() -> bool:
    """Return whether the calling thread has modes or hooks of torch that lanes don't have."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or _top_saved_tensors_default_hooks(False)
    )


def _fix_threads(threads: int) -> None:
    """Set the number of intra-op threads of this new thread, whatever other threads set later.

    At its first use of torch a thread adopts the number that any thread has set last, even over its
    own setting. So the first use must come before the setting.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)
