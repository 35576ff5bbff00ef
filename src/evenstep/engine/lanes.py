"""Lanes: where tasks are carried out, each task wholly, one at a time a lane.

A lane is told what to do with `put` and tells the engine when it is done, by the function that
`open` gave it. It decides nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from evenstep.devices import Device
from evenstep.engine.task import PLAIN, Task, in_modes

_GRACE_S = 0.2  # for the thread of a lost lane to end, if it still can

CarryOut: TypeAlias = "Callable[[int, Task], None]"
"""Runs a task in the calling thread, as that lane, and reports its end."""


class Lanes(Protocol):
    """What the engine needs of its lanes: two for each device, the second one for copies."""

    def open(self, carry_out: CarryOut) -> None:
        """Start."""
        ...

    def put(self, lane: int, task: Task) -> None:
        """Have `carry_out(lane, task)` called, after what was put there before."""
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
        self._inboxes: list[queue.SimpleQueue[Task | None]] = []
        self._threads: list[threading.Thread] = []
        self._here = threading.local()

    def open(self, carry_out: CarryOut) -> None:
        """Start a computing and a copying thread for each device."""
        torch.get_num_threads()  # settle the caller's own number before the lanes set theirs
        roles = [(device, f"evenstep {device}") for device in self.devices]
        roles += [(device, f"evenstep copy {device}") for device in self.devices]
        self._inboxes = [queue.SimpleQueue() for _ in roles]
        self._threads = [
            threading.Thread(target=self._work, args=(lane, *role, carry_out), daemon=True)
            for lane, role in enumerate(roles)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, lane: int, task: Task) -> None:
        """Give a lane its next task."""
        self._inboxes[lane].put(task)

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

    def _work(self, lane: int, device: Device, name: str, carry_out: CarryOut) -> None:
        threading.current_thread().name = name
        self._here.lane = lane
        _settle_threads(device.threads)
        inbox = self._inboxes[lane]
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)
            torch.cuda.set_stream(torch.cuda.Stream(device.index))
        while (task := inbox.get()) is not None:
            carry_out(lane, task)
            del task  # an idle lane must not keep a step's tensors alive


class InlineLanes:
    """Lanes without threads: a task runs in the thread that submits it, before `submit` returns.

    A real stand-in: the same results with nothing beside anything else, for tests and debuggers.

    Attributes:
        here: the lane of the task that runs.
    """

    side_by_side = False

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._todo: deque[tuple[int, Task]] = deque()
        self._carry_out: CarryOut | None = None
        self._at_work = False
        self.here = -1

    def open(self, carry_out: CarryOut) -> None:
        """Keep what is called for each task."""
        self._carry_out = carry_out

    def put(self, lane: int, task: Task) -> None:
        """Note the task for `work`."""
        self._todo.append((lane, task))

    def work(self) -> None:
        """Run what was put, and what that starts, one after the other."""
        if self._at_work or not self._todo:
            return
        assert self._carry_out is not None
        self._at_work = True
        before = torch.get_num_threads()
        try:
            with in_modes(PLAIN):  # those of a lane; and what a task leaves behind is put back
                while self._todo:
                    lane, task = self._todo.popleft()
                    self.here = lane
                    torch.set_num_threads(self.devices[lane % len(self.devices)].threads)
                    self._carry_out(lane, task)
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
