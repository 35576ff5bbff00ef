"""Lanes: the worker threads of the devices. Each lane makes one call at a time.

A lane makes the calls that `put` queues, in that order. The scheduler makes all decisions.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch.autograd import forward_ad

from evenstep.devices import Device, accelerator
from evenstep.engine.task import PLAIN, in_modes
from evenstep.errors import DeviceError
from evenstep.private_torch.compilers import compile_scripts, level_of, scripts_are_compiled
from evenstep.private_torch.dispatch import count_dispatch_modes, count_function_modes
from evenstep.private_torch.graph import saving_hooks

_GRACE_S = 0.2  # how long `close` waits for the thread of a lost lane, which may never end

Work: TypeAlias = "Callable[[int], object]"
"""Called in a lane with the lane's number; must not raise."""

Died: TypeAlias = "Callable[[int, BaseException], object]"
"""Called in a lane that ends before it was closed, with its number and the error that ended it."""


Within: TypeAlias = "Callable[[], contextlib.AbstractContextManager[object]]"
"""Returns a context that a lane computes in."""


class Lanes(Protocol):
    """The interface of the engine to its lanes: a computing and a copying lane for each device."""

    died: Died
    within: Within
    threads: set[int]

    def open(self) -> None:
        """Start the lanes. Raises DeviceError if one of them can't start; then none is left."""

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

    def adopt(self, lane: int, seat: int) -> None:
        """Make the calling thread, which a task has started, compute as a thread of `lane`.

        Of those that compute at the same time, each has a seat. On accelerators it has streams,
        which the next thread in it uses, too: the memory that one stream has freed, and the
        workspace that cuBLAS keeps for it, are for no other.
        """


class ThreadLanes:
    """Lanes with one thread each, from `open` to `close`.

    Attributes:
        died: called in a lane that ends before `close`.
        within: every lane computes in the context that it returns.
        threads: the threads of the lanes, in which no caller may wait for a lane.
    """

    side_by_side = True

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.died: Died = _ignore
        self.within: Within = contextlib.nullcontext
        self.threads: set[int] = set()
        self._inboxes: list[queue.SimpleQueue[Work | None]] = []
        self._threads: list[threading.Thread] = []
        self._here = threading.local()
        self._streams: dict[tuple[int, int], Sequence[torch.Stream]] = {}  # of threads' seats

    def open(self) -> None:
        """Start a computing and a copying thread for each device, and wait until all are ready.

        Raises:
            DeviceError: the system refuses another thread, or a thread can't be set up.
        """
        torch.get_num_threads()  # fix the caller's own number before the lanes set theirs
        roles = [(device, f"evenstep {device}") for device in self.devices]
        roles += [(device, f"evenstep copy {device}") for device in self.devices]
        self._inboxes = [queue.SimpleQueue() for _ in roles]
        outcomes: _Outcomes = queue.SimpleQueue()
        for lane, (device, name) in enumerate(roles):
            run = functools.partial(self._run, lane, device, self._inboxes[lane], outcomes)
            self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        try:
            self._start(outcomes)
        except BaseException:
            self.close(set())
            raise

    def _start(self, outcomes: _Outcomes) -> None:
        """Start the threads in one that no exception from outside reaches, and wait for them.

        In `Thread.start` it could leave a lock locked, for which the new thread would wait forever.
        """
        threads = tuple(self._threads)
        try:
            _thread.start_new_thread(_start_each, (threads, outcomes))
        except RuntimeError as refused:
            raise self._not_started(refused, 0) from refused
        errors = [error for _ in threads if (error := outcomes.get()) is not None]
        if errors:
            raise self._not_started(errors[0], len(threads) - len(errors)) from errors[0]

    def _not_started(self, error: BaseException, started: int) -> DeviceError:
        return DeviceError(
            f"{len(self.devices)} devices need two threads each, but after {started} "
            f"threads one could not be started ({error}): use fewer devices, or fewer threads of "
            f"each"
        )

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
            with contextlib.suppress(RuntimeError):  # it has not begun, and will end at once
                thread.join(_GRACE_S if lane in lost else None)
        self._inboxes, self._threads = [], []
        self.threads.clear()

    @property
    def inside(self) -> bool:
        """Whether the calling thread is one of the lanes."""
        return hasattr(self._here, "lane")

    @property
    def here(self) -> int:
        """The lane of the calling thread."""
        lane: int = self._here.lane
        return lane

    def adopt(self, lane: int, seat: int) -> None:
        """Make the calling thread compute as the lane's own thread does."""
        self._here.lane = lane
        device = self.devices[lane % len(self.devices)]
        self._streams[lane, seat] = self._fix(device, self._streams.get((lane, seat)))
        self.within().__enter__()  # until the thread ends

    def _run(
        self,
        lane: int,
        device: Device,
        inbox: queue.SimpleQueue[Work | None],
        outcomes: _Outcomes,
    ) -> None:
        """Work as a lane; report the outcome of its start, and the error that ends it."""
        try:
            self._set_up(lane, device)
        except BaseException as error:
            outcomes.put(error)
            return
        outcomes.put(None)
        try:
            with self.within():
                _work(lane, inbox)
        except BaseException as error:
            self.died(lane, error)

    def _set_up(self, lane: int, device: Device) -> None:
        self.threads.add(threading.get_ident())
        self._here.lane = lane
        self._fix(device)

    @staticmethod
    def _fix(
        device: Device, streams: Sequence[torch.Stream] | None = None
    ) -> Sequence[torch.Stream]:
        """Set this thread up for a device; return its streams: those given, or new ones."""
        _fix_threads(device.threads)
        _fix_modes()
        if not device.is_accelerator:
            return ()
        if streams is None:
            others = (part for part in device.parts if part.index != device.index)
            streams = accelerator.streams_on([one.torch_device for one in (*others, device)])
        accelerator.open_lane(streams)
        return streams


_Outcomes: TypeAlias = "queue.SimpleQueue[BaseException | None]"
"""Of the starts of lanes: None, or the error."""


def _start_each(threads: Sequence[threading.Thread], outcomes: _Outcomes) -> None:
    """Start `threads`; from the first that can't be started on, the error is their outcome."""
    waiting = deque(threads)
    try:
        while waiting:
            waiting[0].start()
            waiting.popleft()
    except BaseException as error:
        for _ in waiting:
            outcomes.put(error)


def _ignore(lane: int, error: BaseException) -> None:
    """Stand in for the engine where lanes are used without one."""


def _work(lane: int, inbox: queue.SimpleQueue[Work | None]) -> None:
    """Make the calls in `inbox` until it holds None."""
    while (work := inbox.get()) is not None:
        work(lane)
        del work  # an idle lane must not keep a step's tensors alive


class InlineLanes:
    """Lanes without threads: a task runs in the thread that submits it, before `submit` returns.

    The results are the same, and only one task runs at a time: for tests and debuggers.

    Attributes:
        here: the lane of the running task.
        died: never called, since there is no thread that could end.
        within: tasks run in the context that it returns.
        threads: the thread that runs a task now.
    """

    side_by_side = False

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.died: Died = _ignore
        self.within: Within = contextlib.nullcontext
        self.threads: set[int] = set()
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
        self.threads = {threading.get_ident()}
        before = torch.get_num_threads()
        try:
            # As in a thread of its own; undoes what a task leaves behind, too.
            with in_modes(PLAIN), _fixed_modes(), self.within():
                while self._queue:
                    lane, work = self._queue.popleft()
                    self.here = lane
                    torch.set_num_threads(self.devices[lane % len(self.devices)].threads)
                    work(lane)
        finally:
            self._is_working = False
            self.threads = set()
            torch.set_num_threads(before)

    def close(self, lost: set[int]) -> None:
        """Do nothing: there are no threads to stop."""

    def adopt(self, lane: int, seat: int) -> None:
        """Make the calling thread compute as a task of that lane does."""
        _fix_threads(self.devices[lane].threads)
        self.within().__enter__()

    @property
    def inside(self) -> bool:
        """Whether a task is running."""
        return self._is_working


def has_own_modes() -> bool:
    """Return whether the calling thread has modes or hooks of torch that lanes don't have."""
    return bool(
        count_function_modes()
        or count_dispatch_modes()
        or saving_hooks(False)
        or level_of(forward_ad) >= 0  # of any thread
    )


def _fix_threads(threads: int) -> None:
    """Set the number of intra-op threads of this new thread, whatever other threads set later.

    At its first use of torch a thread adopts the number that any thread has set last, even over its
    own setting. So the first use must come before the setting.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


def _fix_modes() -> None:
    """Switch off, in this thread, what would make bits depend on earlier calls or other threads.

    Autocast's cache of cast weights is shared by the process: a weight that is used twice would be
    cast once or twice, and its gradient rounded accordingly. Functions made by `torch.jit.script`
    are compiled, and then round differently, after a number of calls.
    """
    torch.set_autocast_cache_enabled(False)
    compile_scripts(False)


@contextlib.contextmanager
def _fixed_modes() -> Iterator[None]:
    """Inside `with`, the calling thread has the modes that `_fix_modes` sets."""
    caches, optimizes = torch.is_autocast_cache_enabled(), scripts_are_compiled()
    _fix_modes()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        compile_scripts(optimizes)
