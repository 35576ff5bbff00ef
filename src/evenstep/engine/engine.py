"""The engine: a front end that returns at once, and lanes behind it.

`submit` notes a task and returns a handle. The task runs when what it reads has been written, on
the lane it is bound to or on whichever is free. (Dive into Deep Learning, "Asynchronous
Computation" and "Automatic Parallelism".)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from evenstep.devices import Device, Devices, find_devices
from evenstep.engine import handle as handles
from evenstep.engine import streams
from evenstep.engine.guard import Guard
from evenstep.engine.handle import Handle
from evenstep.engine.lanes import Lanes, ThreadLanes
from evenstep.engine.schedule import Decisions, Scheduler, Submission
from evenstep.engine.task import Task, is_device_failure
from evenstep.errors import (
    ClosedError,
    DeadlockError,
    DeviceError,
    DeviceLostError,
    InputError,
    add_note,
)
from evenstep.profiling.trace import Span, Trace

logger = logging.getLogger("evenstep")

_TICK_S = 0.02


class Engine:
    """Runs tasks on devices, each as soon as what it reads has been written.

        with evenstep.Engine(devices=["cpu:0", "cpu:1"]) as engine:
            y = engine.submit(torch.mm, x, x)  # a handle, at once
            z = engine.submit(torch.add, y, 2, device="cpu:1")  # after y
            print(z)  # waits

    `with` starts two lanes (threads) for each device, one that computes and one that copies, and
    ends them. At the end all tasks are done; an error that nobody waited for is raised there.

    Args:
        devices: "auto", a number, or names (see `find_devices`).
        threads: intra-op threads for each device.
        max_in_flight: tasks that may be unfinished; `submit` waits while there are as many. None:
            no bound, `submit` never waits.
        lanes: what carries the tasks out; `InlineLanes` does without threads.

    Attributes:
        devices: where tasks run.
        trace: what ran where and when.
        scheduler: who decides; its questions may be asked at any time.
        lanes: where work runs, also work that waits for nothing; for those who build on the engine.
        lost_lanes: the computing lanes whose devices were given up.
        listener: called in the lanes, one at a time, as `listener(lane, task, seconds)` at the end
            of each task.

    Raises:
        InputError: (its subclass DeviceError, too) for arguments that can't be.
    """

    def __init__(
        self,
        devices: Devices = "auto",
        *,
        threads: int = 1,
        max_in_flight: int | None = None,
        lanes: Callable[[Sequence[Device]], Lanes] = ThreadLanes,
    ) -> None:
        self.lanes: Lanes
        if max_in_flight is not None and max_in_flight < 1:
            raise InputError(f"got max_in_flight={max_in_flight}: at least 1 is needed, or None")
        self.devices = find_devices(devices, threads=threads)
        self.max_in_flight = max_in_flight
        count = len(self.devices)
        rows = [device.name for device in self.devices]
        self.trace = Trace([*rows, *(f"copy {row}" for row in rows)])
        self.scheduler = Scheduler(count, bound_only=count)
        self._make_lanes = lanes
        self._lanes: Lanes | None = None
        self.lost_lanes: frozenset[int] = frozenset()
        self._opened = contextlib.ExitStack()
        self._guard = Guard()
        self._numbers = {device.name: number for number, device in enumerate(self.devices)}
        self._has_gpu = any(device.kind == "cuda" for device in self.devices)
        self._failed: set[Task] = set()
        self._wanted: list[tuple[int, threading.Event]] = []
        self._dropping = False
        self._vars = 0
        self.listener: Callable[[int, Task, float], None] | None = None

    def __enter__(self) -> Engine:
        """Start the lanes."""
        if self._lanes is not None:
            raise ClosedError("the engine is open already")
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._guard.protected())
            lanes = self._make_lanes(self.devices)
            lanes.open()
            self._opened = opened.pop_all()
        self._lanes = self.lanes = lanes
        self._dropping = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish what was submitted (after an error: drop what has not begun); end the lanes."""
        self._dropping = error is not None
        try:
            self.close()
        except BaseException as late:
            if error is None:
                raise
            logger.error("besides, a task failed: %r", late)

    def close(self) -> None:
        """Wait for every task and end every thread.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed meanwhile; what had not begun was dropped.
            the first error that nobody waited for.
        """
        if self._lanes is None:
            return
        self._refuse_inside("close the engine")
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                self._wait_until(0)
                self._lanes.close(self.scheduler.lost)
                break
            except KeyboardInterrupt as error:  # what runs can't be stopped, what waits is dropped
                interrupted = error
                self._dropping = True
        self._lanes = None
        self._opened.close()
        if interrupted is not None:
            raise interrupted
        self._raise_unseen()

    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        device: str | Device | None = None,
        prefer: str | Device | None = None,
        reads: Iterable[handles.Var] = (),
        writes: Iterable[handles.Var] = (),
        name: str | None = None,
        story: Mapping[str, object] | None = None,
    ) -> Handle:
        """Have `function(*arguments)` called in a lane; return a handle of its result at once.

        Args:
            function: called with the grad mode, autocast and context variables of the caller.
            arguments: handles and Vars among them (also in lists, tuples and dicts) arrive as their
                values, once those are there.
            device: the device to run on; None for whichever is free first.
            prefer: a device to run on unless another one has nothing to do before.
            reads: Vars that the function looks at (those among the arguments are known).
            writes: Vars that it changes.
            name: for errors and the trace; else the function's name.
            story: more about it for errors and the trace, such as {"step": 3}.

        Raises:
            DeviceError: `device` is none of the engine's.
            DeadlockError: called in a lane when `max_in_flight` is reached.
            ClosedError: the engine is not open.
        """
        task = Task(
            function,
            arguments,
            lane=None if device is None else self._lane(device),
            run=None if prefer is None else self._lane(prefer),
            name=name,
            reads=tuple(reads),
            writes=tuple(writes),
            story=story,
        )
        self.submit_tasks([task])
        return self.handle(task)

    def copy(self, value: Any, device: str | Device) -> Handle:
        """Copy a handle's, a Var's or a plain tensor to `device`, beside computation.

        The copy runs on the device's copy lane: on a GPU, from pinned memory on a stream of its
        own.
        """
        lane = self._lane(device)
        task = Task(
            streams.copy_to,
            (value, self.devices[lane]),
            lane=self.copy_lane(lane),
            name=f"copy to {self.devices[lane]}",
            category="copy",
        )
        self.submit_tasks([task])
        return self.handle(task)

    def Var(self, value: Any, name: str | None = None) -> handles.Var:  # noqa: N802 - it makes a Var
        """Return mutable state for tasks to read and write, each in its turn."""
        self._vars += 1
        return handles.Var(value, name or f"Var {self._vars}", self._wait_for_var)

    def waitall(self) -> None:
        """Wait for every task.

        Raises:
            the first error (in the order of submission) that nobody waited for.
        """
        self._refuse_inside("wait for all tasks")
        self._wait_until(0)
        for device in self.devices:
            if device.kind == "cuda":
                torch.cuda.synchronize(device.index)
        self._raise_unseen()

    # ---- for those who build on the engine

    def submit_tasks(self, tasks: Sequence[Task]) -> None:
        """Submit `tasks` together, in this order."""
        lanes = self._lanes
        if lanes is None:
            raise ClosedError("the engine is not open: use it inside `with`")
        if self.max_in_flight is not None:
            self._wait_until(self.max_in_flight - 1)
        if self._has_gpu:
            fences = [streams.fence_here(d) for d in self.devices if d.kind == "cuda"]
            for task in tasks:
                task.after = fences
        submissions = [_submission(task) for task in tasks]
        with self._guard:
            self._act(self.scheduler.submit(submissions, time.perf_counter()))
        lanes.work()

    def handle(self, task: Task) -> Handle:
        """Return a handle of a task's result."""
        return Handle(task, self._wait_for)

    def copy_lane(self, lane: int) -> int:
        """Return the lane that copies to the device of a computing lane."""
        return len(self.devices) + lane

    def drain(self, task: Task) -> None:
        """Wait for the end of `task`, however often Ctrl-C is pressed."""
        while not task.ended:
            with contextlib.suppress(KeyboardInterrupt):
                self.wait_for(task)

    def failure_of(self, task: Task) -> BaseException | None:
        """Return what an ended task failed with, itself or by what it needed; None if it didn't."""
        if task.cause is None:
            return None
        return self._told(task.cause)

    @property
    def lane_here(self) -> int:
        """The lane that the calling task runs on."""
        assert self._lanes is not None
        return self._lanes.here

    @property
    def first_lane(self) -> int:
        """The first computing lane that is not lost."""
        return min(set(range(len(self.devices))) - self.scheduler.lost)

    @property
    def side_by_side(self) -> bool:
        """Whether tasks on several devices may wait for each other."""
        assert self._lanes is not None
        return self._lanes.side_by_side

    def adopt(self, lane: int) -> None:
        """Make the calling thread, which a task has started, one of that lane's."""
        assert self._lanes is not None
        self._lanes.adopt(lane)

    def give_up_device_of(self, task: Task) -> None:
        """Give up the device that made an ended task fail, if it is a device that failed."""
        cause = task.cause
        if isinstance(cause, Task) and is_device_failure(cause.error):
            lane = cause.lane if cause.ran_on is None else cause.ran_on
            if lane is not None and lane not in self.scheduler.lost:
                self.lose(lane % len(self.devices))

    def lose(self, lane: int) -> None:
        """Give a device up: its tasks fail, nothing is given to it, and nobody waits for it."""
        self.lost_lanes |= {lane}
        with self._guard:
            self._act(self.scheduler.lose(lane, time.perf_counter()))
            self._act(self.scheduler.lose(self.copy_lane(lane), time.perf_counter()))
        if self._lanes is not None:
            self._lanes.work()

    def wait_for(self, task: Task, timeout_s: float | None = None) -> bool:
        """Wait until `task` has ended, on a GPU too; say whether it has."""
        if not task.ended:
            self._refuse_inside(f"wait for {task.name!r}")
            ended = threading.Event()
            with self._guard:
                if task.ended:
                    ended.set()
                else:
                    task.wakes.append(ended)
            if not self._await(ended, timeout_s):
                return False
        if task.fence is not None:
            task.fence.synchronize()
        return True

    # ---- in the front end

    def _lane(self, device: str | Device) -> int:
        name = device.name if isinstance(device, Device) else device
        lane = self._numbers.get(name)
        if lane is None:
            (found,) = find_devices([device])
            lane = self._numbers.get(found.name)
        if lane is None:
            raise DeviceError(
                f"got device {name}, but the engine has {', '.join(self._numbers)}: use one of them"
            )
        return lane

    def _wait_for(self, task: Task) -> None:
        self.wait_for(task)
        if task.cause is not None:
            raise self._told(task.cause)

    def _wait_for_var(self, var: handles.Var) -> None:
        writer, cause = var.writer, var.cause
        if writer is not None:
            assert isinstance(writer, Task)
            self._wait_for(writer)
        elif cause is not None:
            raise self._told(cause)
        for fence in var.fences:
            if fence is not None:
                fence.synchronize()

    def _wait_until(self, unfinished: int) -> None:
        """Wait until no more than so many tasks are unfinished."""
        while self.scheduler.graph.unfinished > unfinished:
            self._refuse_inside(f"submit a task beyond max_in_flight={self.max_in_flight}")
            reached = threading.Event()
            with self._guard:
                if self.scheduler.graph.unfinished <= unfinished:
                    return
                self._wanted.append((unfinished, reached))
            self._await(reached)

    def _await(self, event: threading.Event, timeout_s: float | None = None) -> bool:
        """Wait for `event`, and look meanwhile whether a late run is worth stealing from."""
        waited_s = 0.0
        while timeout_s is None or waited_s < timeout_s:
            if self._lanes is not None:
                self._lanes.work()
            if event.wait(_TICK_S):
                return True
            waited_s += _TICK_S
            with self._guard:
                if self.scheduler.can_steal:
                    self._act(self.scheduler.tick(time.perf_counter()))
        return False

    def _refuse_inside(self, what: str) -> None:
        if self._lanes is not None and self._lanes.inside:
            raise DeadlockError(
                f"a task can't {what}: its lane would stand still meanwhile, perhaps for ever. "
                f"Give the handle to another task as an argument instead"
            )

    def _raise_unseen(self) -> None:
        with self._guard:
            unseen = sorted(self._failed, key=lambda task: task.number)
            self._failed.clear()
        for task in unseen:
            task.seen = True
        if unseen:
            error = self._told(unseen[0])
            if len(unseen) > 1:
                add_note(error, f"{len(unseen) - 1} more failed: {unseen[1].error!r}, ...")
            raise error

    def _told(self, cause: object) -> BaseException:
        """Return the error of a task that failed, with its own traceback, and note who knows."""
        assert isinstance(cause, Task)
        with self._guard:  # it ends wholly before it is told
            cause.seen = True
            self._failed.discard(cause)
        assert cause.error is not None
        return cause.error.with_traceback(cause.traceback)

    # ---- in the lanes

    def _carry_out(self, lane: int, task: Task) -> None:
        """Run a task in the calling lane, and start what waited for its end."""
        device = self.devices[lane % len(self.devices)]
        result, error = None, None
        began = time.perf_counter()
        try:
            result = self._call(task, device)
        except BaseException as caught:
            error = caught
            add_note(error, task.tell(device))
        ended = time.perf_counter()
        story = {**(task.story or {}), "stolen": True} if task.stolen else task.story
        with self._guard:
            if not task.ended:  # else its lane was lost meanwhile
                task.result = result
                if error is not None:
                    task.error, task.traceback = error, error.__traceback__
            self.trace.add(Span(lane, task.name, task.category, began, ended, story))
            if self.listener:
                self.listener(lane, task, ended - began)
            self._act(self.scheduler.ended(lane, task, ended, failed=error is not None))

    def _call(self, task: Task, device: Device) -> Any:
        if self._dropping:
            task.seen = True  # whoever dropped it knows
            raise ClosedError(f"{task.name!r} was dropped: the engine was closed before it")
        if self._has_gpu:
            streams.open_task(task, device)
        result = task.call()
        if self._has_gpu:
            streams.close_task(task, device)
        return result

    def _act(self, decisions: Decisions) -> None:
        """Carry decisions out; called under the guard."""
        for lane, task in decisions.starts:
            assert self._lanes is not None
            task.ran_on = lane
            self._lanes.put(lane, functools.partial(self._carry_out, task=task))
        for task in decisions.ends:
            if task.cause is task:
                self._note_failure(task)
            task.let_go()
            for event in task.wakes:
                event.set()
        if self._wanted and decisions.ends:
            unfinished = self.scheduler.graph.unfinished
            for wanted in [wanted for wanted in self._wanted if unfinished <= wanted[0]]:
                self._wanted.remove(wanted)
                wanted[1].set()

    def _note_failure(self, task: Task) -> None:
        if task.error is None:
            lane = task.lane if task.ran_on is None else task.ran_on
            device = "every device" if lane is None else self.devices[lane % len(self.devices)]
            task.error = DeviceLostError(
                f"{device} was lost, and {task.name!r} with it: it is out of use now"
            )
            add_note(task.error, task.tell(device))
        if not task.seen:
            self._failed.add(task)


def _submission(task: Task) -> Submission:
    if not task.sources:
        return task, (), task.reads, task.writes
    inputs = [source.task for source in task.sources if isinstance(source, Handle)]
    given = [source for source in task.sources if isinstance(source, handles.Var)]
    return task, inputs, (*given, *task.reads), task.writes
