"""Lanes: a worker thread for each device, started and stopped by `with`.

`run` is fork and join: it gives each task to the lane of its device, waits for all, and returns
what they returned. After the first error, or Ctrl-C, tasks not yet begun are dropped and the ones
that run are waited for, so that when `run` ends nothing is still at work.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from evenstep.devices import Device
from evenstep.errors import ClosedError


class Task(NamedTuple):
    """A call to be made in the lane of one device (an index into the lanes' devices)."""

    lane: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


class Lanes(contextlib.AbstractContextManager["Lanes"], Protocol):
    """What the trainer needs of its lanes."""

    busy_s: list[float]

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Run `tasks` in their lanes; return their results in the order of `tasks`."""
        ...


class InlineLanes:
    """Lanes without threads: every task runs at once, in the caller's thread, in order.

    A real stand-in: the same results with nothing beside anything else, for tests and debuggers.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.busy_s = [0.0] * len(self.devices)

    def __enter__(self) -> InlineLanes:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to stop."""

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Run `tasks` one after the other, each with its device's number of threads."""
        before = torch.get_num_threads()
        try:
            return [self._run_one(task) for task in tasks]
        finally:
            torch.set_num_threads(before)

    def _run_one(self, task: Task) -> Any:
        torch.set_num_threads(self.devices[task.lane].threads)
        began = time.perf_counter()
        try:
            return task.function(*task.arguments)
        finally:
            self.busy_s[task.lane] += time.perf_counter() - began


class ThreadLanes:
    """Lanes with a worker thread for each device; the threads live from `with` to its end.

    Attributes:
        busy_s: for each device, the seconds in which its lane ran a task.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.busy_s = [0.0] * len(self.devices)
        self._inboxes: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ThreadLanes:
        torch.get_num_threads()  # settle the caller's own number before the lanes set theirs
        self._inboxes = [queue.SimpleQueue() for _ in self.devices]
        self._threads = [
            threading.Thread(
                target=self._work, args=(lane,), name=f"evenstep {device}", daemon=True
            )
            for lane, device in enumerate(self.devices)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop every thread and wait for its end."""
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._inboxes, self._threads = [], []

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Run `tasks` in their lanes at the same time; return results in the order of `tasks`.

        Raises the error of the first task, in the order of `tasks`, that failed.
        """
        if not self._threads:
            raise ClosedError("the lanes are not open: use them inside `with`")
        join = _Join(len(tasks))
        try:
            for number, task in enumerate(tasks):
                self._inboxes[task.lane].put(functools.partial(join.carry_out, number, task))
            join.all_ended.wait()
        except BaseException:  # Ctrl-C
            join.dropped = True
            self._drain()
            raise
        return join.results()

    def _drain(self) -> None:
        """Wait until every lane has gone through its inbox, however often Ctrl-C is pressed."""
        passed = [threading.Event() for _ in self._inboxes]
        for inbox, event in zip(self._inboxes, passed, strict=True):
            inbox.put(event.set)
        while not all(event.is_set() for event in passed):
            with contextlib.suppress(KeyboardInterrupt):
                for event in passed:
                    event.wait()

    def _work(self, lane: int) -> None:
        device = self.devices[lane]
        _settle_threads(device.threads)
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)
        while (job := self._inboxes[lane].get()) is not None:
            began = time.perf_counter()
            job()
            self.busy_s[lane] += time.perf_counter() - began
            del job  # an idle lane must not keep a step's tensors alive


def _settle_threads(threads: int) -> None:
    """Let torch use `threads` threads in this new thread, whatever other threads ask for later.

    At its first use of torch a thread takes the number that any thread has set last, even over its
    own: so the first use comes before the setting.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


class _Join:
    """What `run` waits for: the results and errors of its tasks, and a latch for the last one."""

    def __init__(self, count: int) -> None:
        self.all_ended = threading.Event()
        self.dropped = False
        self._results: list[Any] = [None] * count
        self._errors: dict[int, BaseException] = {}
        self._left = count
        self._lock = threading.Lock()
        if count == 0:
            self.all_ended.set()

    def carry_out(self, number: int, task: Task) -> None:
        if not self.dropped:
            try:
                self._results[number] = task.function(*task.arguments)
            except BaseException as error:
                self._errors[number] = error
                self.dropped = True
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.all_ended.set()

    def results(self) -> list[Any]:
        if self._errors:
            raise self._errors[min(self._errors)]
        return self._results


class ForkJoinHandle:
    """The mean loss of a step; `float(handle)` waits for it."""

    def __init__(self, value: float) -> None:
        self._value = value

    def wait_to_read(self) -> None:
        """Block until the value is there."""

    def item(self) -> float:
        """Wait, and return the value."""
        self.wait_to_read()
        return self._value

    __float__ = item

    def __repr__(self) -> str:
        return f"Handle({self.item()})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)
