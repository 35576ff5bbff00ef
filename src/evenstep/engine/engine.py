"""The engine: `submit` returns at once, and tasks run on lanes as soon as their inputs exist.

A task runs on the lane it is bound to, or on the first one that is free. (Dive into Deep Learning,
"Asynchronous Computation" and "Automatic Parallelism".)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Any

import torch

from evenstep.devices import (
    Device,
    Devices,
    accelerator,
    as_device,
    find_devices,
    short_switch_interval,
)
from evenstep.engine import handle as handles
from evenstep.engine import streams
from evenstep.engine.exclusive import Exclusive
from evenstep.engine.graph import Place
from evenstep.engine.handle import Handle
from evenstep.engine.interrupts import INTERRUPTS, POLL_S, interruptible
from evenstep.engine.lanes import Lanes, ThreadLanes, Within
from evenstep.engine.ownership import Ownership
from evenstep.engine.schedule import Decisions, Scheduler, Submission
from evenstep.engine.task import IS_ASIDE, PLAIN, Task, is_device_failure, name_of
from evenstep.errors import (
    ClosedError,
    DeadlockError,
    DeviceError,
    DeviceLostError,
    InputError,
    add_note,
    counted,
    shown,
    text_of,
)
from evenstep.profiling.trace import Span, Trace

logger = logging.getLogger("evenstep")


class Engine:
    """Runs tasks on devices, each as soon as the values that it reads have been written.

        with evenstep.Engine(devices=["cpu:0", "cpu:1"]) as engine:
            y = engine.submit(torch.mm, x, x)  # returns a handle at once
            z = engine.submit(torch.add, y, 2, device="cpu:1")  # runs after y
            print(z)  # waits

    `with` starts two lanes (threads) for each device, one that computes and one that copies. At its
    end it waits for all tasks, stops the lanes, and raises the first error that was not raised yet.
    Meanwhile Python's threads take turns after 0.1 ms (`sys.setswitchinterval`).

    Args:
        devices: "auto", a number, a device or a list of devices (see `find_devices`).
        threads: intra-op threads of each device.
        max_in_flight: the largest number of unfinished tasks; `submit` waits when it is reached.
            None: no limit, `submit` never waits.
        lanes: the executor of the tasks; `InlineLanes` runs them without threads.
        within: returns a context that every lane computes in, such as a mode of torch.

    Attributes:
        devices: the devices that tasks run on.
        trace: a record of what ran where and when.
        scheduler: assigns tasks to lanes; its state may be read at any time.
        lanes: the lanes of an open engine, also for work that needs no order.
        lost_lanes: the computing lanes of lost devices.
        given_up: the lost lanes that were still at work when Ctrl-C was pressed twice.
        broken_by: an exception, thrown into a thread from outside, that has interrupted a change of
            the scheduler; None while tasks can be relied on.
        patience_s: seconds after the first Ctrl-C; a second one pressed later than this gives up
            the devices that are still at work.

    Raises:
        InputError: (or its subclass DeviceError) an argument is invalid.
    """

    patience_s = 1.0

    def __init__(
        self,
        devices: Devices = "auto",
        *,
        threads: int = 1,
        max_in_flight: int | None = None,
        lanes: Callable[[Sequence[Device]], Lanes] = ThreadLanes,
        within: Within = contextlib.nullcontext,
    ) -> None:
        self.lanes: Lanes
        if max_in_flight is not None and max_in_flight < 1:
            raise InputError(f"got max_in_flight={max_in_flight}: give at least 1, or None")
        self.devices = find_devices(devices, threads=threads)
        self.max_in_flight = max_in_flight
        count = len(self.devices)
        rows = [device.name for device in self.devices]
        self.trace = Trace([*rows, *(f"copy {row}" for row in rows)])
        self.scheduler = Scheduler(count, bound_only=count)
        self._make_lanes = lanes
        self._within = within
        self._lanes: Lanes | None = None
        self.lost_lanes: frozenset[int] = frozenset()
        self.given_up: frozenset[int] = frozenset()
        self._deaths: dict[int, BaseException] = {}
        self._owner: Ownership | None = None
        self._opened = contextlib.ExitStack()
        self._lock = Exclusive()
        self._numbers = {device.name: number for number, device in enumerate(self.devices)}
        self._has_gpu = any(device.is_accelerator for device in self.devices)
        self._failed: set[Task] = set()
        self._waiters: list[tuple[int, threading.Lock]] = []
        self.broken_by: BaseException | None = None
        self._forgotten = 0  # the tasks with smaller numbers
        self._is_dropping = False
        self._vars = 0

    @INTERRUPTS.shielded
    def __enter__(self) -> Engine:
        """Start the lanes."""
        if self._lanes is not None:
            raise ClosedError("the engine is open already")
        self._deaths.clear()
        self.broken_by = None
        self._is_dropping = False
        opened = contextlib.ExitStack()
        try:
            opened.enter_context(INTERRUPTS.handled())
            opened.enter_context(short_switch_interval())
            lanes = self._make_lanes(self.devices)
            lanes.died = self._lane_died
            lanes.within = self._within
            opened.callback(lanes.close, set())
            lanes.open()
            self._owner = Ownership("engine", self._close_at_exit)
            self._opened, self._lanes, self.lanes = opened, lanes, lanes
        except BaseException:
            try:
                opened.close()
            except BaseException:  # maybe thrown into this thread, and has cut that off
                opened.close()
                raise
            raise
        return self

    @INTERRUPTS.shielded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the submitted tasks (after an error: drop those not started); stop the lanes."""
        self._is_dropping = error is not None
        try:
            self.close()
        except BaseException as late:
            if error is None:
                raise
            logger.error("another task failed, too: %r", late)
        finally:
            INTERRUPTS.deliver()

    @INTERRUPTS.shielded
    def close(self) -> None:
        """Wait for every task and stop the lanes.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed meanwhile; tasks that had not started were
                dropped.
            Exception: the first error that was not raised yet.
        """
        if self._lanes is None or self._owner is None:
            return
        if self._owner.is_elsewhere:  # a fork has no lanes
            self._lanes = None
            return
        self.refuse_inside("close the engine")
        try:
            interrupted = self._finish()
            self._lanes.close(self.scheduler.lost)
            self._owner.end()
            try:
                self._opened.close()
            except BaseException:  # maybe thrown into this thread, and has cut that off
                self._opened.close()
                raise
            self._lanes = None
            if interrupted is not None:
                raise interrupted
            self._raise_unseen()
        finally:
            INTERRUPTS.deliver()

    def _finish(self) -> BaseException | None:
        """Wait for every task; return what a handler of signals has raised meanwhile.

        Then tasks that have not started are dropped. A running task can't be stopped: its device is
        given up when another signal comes later.
        """
        interrupted: BaseException | None = None
        finished = self._when_at_most(0)
        self.lanes.work()
        while not finished.acquire(timeout=POLL_S):
            if self.broken_by is not None:
                self.mend()
                return None
            if (error := _raised_by(self._refuse_to_stand_still)) is not None:
                return error
            error = _raised_by(INTERRUPTS.check)
            if error is not None and interrupted is None:
                interrupted, since_s = error, time.monotonic()
                self._is_dropping = True
            elif error is not None and time.monotonic() - since_s > self.patience_s:
                self._give_up_at_work()
        return interrupted

    def _close_at_exit(self) -> None:
        self.__exit__(ClosedError, ClosedError("the program ended"), None)

    @INTERRUPTS.uninterrupted
    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        device: str | torch.device | Device | None = None,
        reads: Iterable[handles.Var] = (),
        writes: Iterable[handles.Var] = (),
        name: str | None = None,
        story: Mapping[str, object] | None = None,
    ) -> Handle:
        """Run `function(*arguments)` in a lane; return a handle of its result at once.

        Args:
            function: called with the caller's grad mode, autocast and context variables.
            arguments: passed to the function; handles and Vars among them, also in lists, tuples
                and dicts, are replaced by their values.
            device: the device to run on; None: the first one that is free.
            reads: Vars that the function reads, besides those among the arguments.
            writes: Vars that the function changes.
            name: the task's name in errors and in the trace; None: the function's name.
            story: further facts for errors and the trace, such as {"step": 3}.

        Raises:
            DeviceError: the engine does not have `device`.
            DeadlockError: called inside a task when `max_in_flight` is reached.
            ClosedError: the engine is not open.
        """
        task = Task(
            interruptible,
            (function, *arguments),
            lane=None if device is None else self._lane(device),
            name=name or name_of(function),
            reads=tuple(reads),
            writes=tuple(writes),
            story=story,
        )
        self.submit_tasks([task])
        return self.handle(task)

    @INTERRUPTS.uninterrupted
    def copy(self, value: Any, device: str | torch.device | Device) -> Handle:
        """Copy the tensors in `value` (a handle, a Var or plain) to `device`.

        The copy runs on the device's copy lane, alongside computation: to a GPU, from pinned memory
        on a stream of its own.
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
        """Return mutable state that tasks read and write in the order of submission."""
        self._vars += 1
        return handles.Var(value, name or f"Var {self._vars}", self.wait_for_var)

    @INTERRUPTS.uninterrupted
    def waitall(self) -> None:
        """Wait for every task.

        Raises:
            Exception: the first error, in the order of submission, that was not raised yet.
        """
        INTERRUPTS.follow()
        self.refuse_inside("wait for all tasks")
        self._wait_until(0)
        for lane, device in enumerate(self.devices):
            if device.is_accelerator and lane not in self.lost_lanes:
                accelerator.synchronize(device.torch_device)
        self._raise_unseen()

    # ---- for code that builds on the engine

    @INTERRUPTS.uninterrupted
    def submit_tasks(self, tasks: Sequence[Task]) -> None:
        """Submit `tasks` together, in this order."""
        lanes = self._lanes
        if lanes is None or self._owner is None:
            raise ClosedError("the engine is not open: use it inside `with`")
        self._owner.refuse_elsewhere()
        if self.max_in_flight is not None:
            self._wait_until(self.max_in_flight - 1)
        if self._has_gpu:
            alive = [d for lane, d in enumerate(self.devices) if lane not in self.lost_lanes]
            fences = streams.fences_here(alive)
            for task in tasks:
                task.after = fences
        submissions = [_submission(task) for task in tasks]
        self._change(lambda: self.scheduler.submit(submissions))
        lanes.work()

    def handle(self, task: Task) -> Handle:
        """Return a handle of a task's result."""
        return Handle(task, self._wait_for)

    def copy_lane(self, lane: int) -> int:
        """Return the copying lane of the device of a computing lane."""
        return len(self.devices) + lane

    @INTERRUPTS.uninterrupted
    def drain(self, task: Task, *, gives_up: bool = True) -> None:
        """Wait until `task` and its kernels have ended, even if Ctrl-C is pressed.

        When Ctrl-C is pressed after `patience_s`, devices that are at work are given up. With
        `gives_up=False` none is, and kernels are only waited for until they are launched.
        """
        INTERRUPTS.follow()
        if task.number < self._forgotten:
            return
        ended, since_s = self._end_of(task), time.monotonic()
        self.lanes.work()
        while not ended.acquire(timeout=POLL_S):
            if self.broken_by is not None:
                self.mend()
                return
            late = time.monotonic() - since_s > self.patience_s
            if gives_up and late and INTERRUPTS.ctrl_c_has_come:
                self._give_up_at_work()
        if gives_up:
            with contextlib.suppress(RuntimeError):  # on a device that has failed, nothing runs
                streams.finish([task.fence], lambda: INTERRUPTS.ctrl_c_has_come)

    @INTERRUPTS.uninterrupted
    def wait_for_lanes(self) -> None:
        """Wait until the lanes have made the calls given to them so far, even if Ctrl-C is pressed.

        When it is pressed after `patience_s`, devices that are at work are given up.
        """
        INTERRUPTS.follow()
        since_s, behind = time.monotonic(), dict[int, threading.Lock]()
        for lane in set(range(2 * len(self.devices))) - self.scheduler.lost:
            behind[lane] = _locked()
            self.lanes.put(lane, functools.partial(_release, behind[lane]))
        self.lanes.work()
        for lane, reached in behind.items():
            while not reached.acquire(timeout=POLL_S) and lane not in self.scheduler.lost:
                late = time.monotonic() - since_s > self.patience_s
                if late and INTERRUPTS.ctrl_c_has_come:
                    self.give_up(lane % len(self.devices))

    def run_and_wait(
        self,
        function: Callable[..., object],
        *arguments: object,
        name: str,
        category: str,
        limit_s: float = math.inf,
    ) -> Task:
        """Run what belongs to no step in the first computing lane; return its ended task.

        Ctrl-C is raised when the function has ended.

        Raises:
            DeviceLostError: the function takes longer than `limit_s`; its device is given up.
            BaseException: the function has raised what is no `Exception`, such as SystemExit.
        """
        lane = self.first_lane
        task = Task(
            function,
            arguments,
            lane=lane,
            name=name,
            category=category,
            modes=PLAIN,
            quiet=True,
        )
        task.context.run(IS_ASIDE.set, True)
        self.submit_tasks([task])
        try:
            ended = self.wait_for(task, None if limit_s == math.inf else limit_s)
        except BaseException:
            self.drain(task)
            raise
        if ended and task.error is not None and not isinstance(task.error, Exception):
            raise task.error
        if ended:
            return task
        self.lose(lane)
        raise self.lost_error(lane)

    def give_up(self, lane: int) -> None:
        """Give up a device that is still at work when Ctrl-C was pressed twice."""
        logger.warning(
            f"{self.devices[lane]} is given up: it was still busy when Ctrl-C was pressed again"
        )
        self.given_up |= {lane}
        self.lose(lane)

    def _give_up_at_work(self) -> None:
        at_work = {lane for lane, task in enumerate(self.scheduler.running) if task is not None}
        for lane in sorted({lane % len(self.devices) for lane in at_work}):
            self.give_up(lane)

    def failure_of(self, task: Task) -> BaseException | None:
        """Return the error of an ended task, its own or that of a failed input, or None."""
        return None if task.cause is None else self._error_of(task.cause)

    @property
    def lane_here(self) -> int:
        """The lane of the calling task."""
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

    def adopt(self, lane: int, seat: int) -> None:
        """Make the calling thread, which a task has started, compute as a thread of `lane`.

        Of those that compute at the same time, each has a `seat`.
        """
        assert self._lanes is not None
        self._lanes.adopt(lane, seat)

    def give_up_device_of(self, task: Task) -> None:
        """Give up the device whose failure, if that is the cause, made an ended task fail."""
        cause = task.cause
        if isinstance(cause, Task) and is_device_failure(cause.error):
            lane = cause.lane if cause.ran_on is None else cause.ran_on
            self.lose_failed(cause.error, None if lane is None else lane % len(self.devices))

    def lose_failed(self, error: BaseException | None, lane: int | None) -> None:
        """Give up the accelerators that refuse every call; if none does, the device of a lane.

        A task may use tensors of other devices than its own, as an update does.

        Args:
            error: the error of a device.
            lane: the computing lane that has raised it.
        """
        failed, lost = self._failed_lanes(), self.scheduler.lost
        if not failed or (isinstance(error, DeviceLostError) and failed <= lost):
            failed |= set() if lane is None else {lane}
        for one in failed - lost:
            self.lose(one)

    def _failed_lanes(self) -> set[int]:
        """Return the lanes of the accelerators that refuse every call."""
        return {
            lane
            for lane, device in enumerate(self.devices)
            if device.is_accelerator and accelerator.has_failed(device.torch_device)
        }

    def refuse_failed(self) -> None:
        """Refuse to use what an accelerator has computed that fails at every call now.

        Raises:
            DeviceLostError: names it.
        """
        for lane in self._failed_lanes() - self.scheduler.lost:
            raise self.lost_error(lane)

    @INTERRUPTS.uninterrupted
    def lose(self, lane: int) -> None:
        """Give up a device: its tasks fail at once, and no further tasks are assigned to it."""
        self.lost_lanes |= {lane}
        for one in (lane, self.copy_lane(lane)):
            self._change(lambda one=one: self.scheduler.lose(one))  # type: ignore[misc]
        if self._lanes is not None:
            self._lanes.work()

    @property
    def dead_lanes(self) -> Set[int]:
        """The computing lanes of devices whose threads have ended."""
        return self._deaths.keys()

    def lost_error(self, lane: int, consequence: str = "it is no longer used") -> DeviceLostError:
        """Return the error that says that a device was lost, and why if that is known."""
        death = self._deaths.get(lane)
        how = "" if death is None else f" (its thread ended with {type(death).__name__})"
        error = DeviceLostError(f"{self.devices[lane]} was lost{how}: {consequence}")
        error.__cause__ = death
        return error

    @INTERRUPTS.uninterrupted
    def wait_for(self, task: Task, timeout_s: float | None = None) -> bool:
        """Wait until `task` has ended (on a GPU: its kernels, too); return whether it has."""
        if not task.ended:
            self.refuse_inside(f"wait for {task.name!r}")
            if not self._await(self._end_of(task), timeout_s):
                return False
        if task.fence is not None and not self._await_kernels([task.fence], timeout_s):
            return False
        if self._has_gpu:
            streams.keep(task.result)
        return True

    @INTERRUPTS.uninterrupted
    def wait_for_var(self, var: handles.Var) -> None:
        """Wait until every task submitted so far that writes `var` has ended; raise its error."""
        writer, cause = var.writer, var.cause
        if writer is not None:
            assert isinstance(writer, Task)
            self._wait_for(writer)
        elif cause is not None:
            raise self._error_of(cause)
        if self._has_gpu:
            self._await_kernels([var.written, *var.fences])
            streams.keep(var.value_in_task())

    # ---- in the submitting thread

    def _lane(self, device: str | torch.device | Device) -> int:
        name = device if isinstance(device, str) else as_device(device).name
        if name not in self._numbers:
            name = as_device(device).name  # spelled out: "cpu" is cpu:0
        if name not in self._numbers:
            raise DeviceError(
                f"got device {name}, but the engine has {', '.join(self._numbers)}: use one of them"
            )
        return self._numbers[name]

    @INTERRUPTS.uninterrupted
    def _wait_for(self, task: Task) -> None:
        self.wait_for(task)
        if task.cause is not None:
            raise self._error_of(task.cause)

    def _wait_until(self, unfinished: int) -> None:
        """Wait until at most `unfinished` tasks are unfinished."""
        while self.scheduler.graph.unfinished > unfinished:
            self.refuse_inside(f"submit a task beyond max_in_flight={self.max_in_flight}")
            self._await(self._when_at_most(unfinished))

    def _when_at_most(self, unfinished: int) -> threading.Lock:
        """Return a lock that is released when at most `unfinished` tasks are unfinished."""
        reached = _locked()

        def wait() -> None:
            if self.scheduler.graph.unfinished <= unfinished:
                reached.release()
            else:
                self._waiters.append((unfinished, reached))

        self._lock.change(wait)
        return reached

    def _end_of(self, task: Task) -> threading.Lock:
        """Return a lock that is released when `task` has ended."""
        ended = _locked()
        self._lock.change(lambda: ended.release() if task.ended else task.wakes.append(ended))
        return ended

    def _await_kernels(self, fences: Sequence[Any], timeout_s: float | None = None) -> bool:
        """Wait until kernels have finished; return whether they have. Signals are handled."""
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s

        def is_late() -> bool:
            if INTERRUPTS.pending:
                INTERRUPTS.check()
            return time.monotonic() >= ends_s

        return streams.finish(fences, is_late)

    def _await(self, reached: threading.Lock, timeout_s: float | None = None) -> bool:
        """Wait until `reached` is released; return whether it is. Signals are handled meanwhile."""
        self.lanes.work()
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not reached.acquire(timeout=min(POLL_S, max(0.0, ends_s - time.monotonic()))):
            if INTERRUPTS.pending:
                INTERRUPTS.check()
            self._refuse_broken()
            self._refuse_to_stand_still()
            if time.monotonic() >= ends_s:
                return False
        return True

    def _refuse_to_stand_still(self) -> None:
        """Refuse to wait where nothing can end the wait.

        Raises:
            DeadlockError: tasks have not ended, and none runs or can start.
        """
        scheduler = self.scheduler
        if self._lock.change(lambda: scheduler.stands_still):
            unfinished = scheduler.graph.unfinished
            raise DeadlockError(
                f"{counted(unfinished, 'task')} of the engine can't start, although no task is "
                f"running: either one depends on a task of another engine, or this is a bug in "
                f"evenstep; please report it"
            )

    def refuse_inside(self, what: str) -> None:
        """Refuse a wait that can't end: in a task, in a change of the engine, in a fork.

        Raises:
            DeadlockError: the caller is a task, or a destructor in the middle of a change.
            ClosedError: the calling process is a fork of the one that opened the engine.
        """
        if self._owner is not None and self._owner.pid != os.getpid():
            self._owner.refuse_elsewhere()
        if self._lanes is not None and self._lanes.inside:
            raise DeadlockError(
                f"a task can't {what}: it would block its worker thread, possibly forever. Pass "
                f"the handle to another task as an argument instead"
            )
        if self._lock.owner == threading.get_ident():
            raise DeadlockError(
                f"a destructor or a signal handler can't {what} while the engine is changing its "
                f"own state: submit a task instead, or wait elsewhere"
            )

    def _raise_unseen(self) -> None:
        unseen = sorted(self._lock.change(self._failed.copy) or (), key=lambda task: task.number)
        self._failed.difference_update(unseen)
        for task in unseen:
            task.seen = True
        if unseen:
            error = self._error_of(unseen[0])
            if len(unseen) > 1:
                second = text_of(self._error_of(unseen[1]), repr)
                add_note(error, f"{len(unseen) - 1} more failed: {second}, ...")
            raise error

    def _error_of(self, cause: object) -> BaseException:
        """Return the error of a failed task with its own traceback; it will not be raised again."""
        assert isinstance(cause, Task)
        if self._owner is None or not self._owner.is_elsewhere:
            # The lock is held until the lane has recorded the whole end of the task.
            self._lock.change(functools.partial(self._see, cause))
        assert cause.error is not None
        # An exception of the user's may redefine its methods, and refuse attributes.
        return BaseException.with_traceback(cause.error, cause.traceback)

    def _see(self, task: Task) -> None:
        task.seen = True
        self._failed.discard(task)

    # ---- in the lanes

    def _execute(self, lane: int, task: Task) -> None:
        """Run a task in the calling lane, and start the tasks that waited for its end."""
        device = self.devices[lane % len(self.devices)]
        result, error, traceback = None, None, None
        began = time.perf_counter()
        try:
            result = self._call(task, device)
        except BaseException as caught:
            error, traceback = caught, sys.exc_info()[2]
            add_note(error, task.describe(device))
        ended = time.perf_counter()
        with self._lock:
            if not task.ended:  # otherwise its lane was lost meanwhile
                task.result = result
                task.error, task.traceback = error, traceback
                if self._has_gpu:
                    streams.note_fence(task)
            dropped = self.trace.add(Span(lane, task.name, task.category, began, ended, task.story))
            left: object = None
            if self.broken_by is None:
                left = self._act(self.scheduler.ended(lane, task, failed=error is not None))
        del dropped, left  # without the lock: destructors may call the engine

    def _call(self, task: Task, device: Device) -> Any:
        if self._is_dropping:
            task.seen = True  # the caller that dropped it does not need its error
            raise ClosedError(f"{task.name!r} was dropped: the engine was closed before it started")
        if self._has_gpu:
            streams.open_task(task, device)
        try:
            result = task.call()
        except BaseException:
            if self._has_gpu:
                with contextlib.suppress(RuntimeError):  # of a device that has failed altogether
                    streams.close_task(task, device)
            raise
        if self._has_gpu:
            streams.close_task(task, device)
        return result

    def _lane_died(self, lane: int, error: BaseException) -> None:
        """Give up the device of a lane whose thread ends, and with it what waits for the lane."""
        device = lane % len(self.devices)
        self._deaths.setdefault(device, error)
        self.lose(device)

    def _change(self, decide: Callable[[], Decisions]) -> None:
        """Change the scheduler, and carry out its decisions."""

        def change() -> object:
            try:
                return self._act(decide())
            except BaseException as error:  # from outside: thrown into this thread
                self.broken_by = error
                raise

        self._lock.change(change)

    def _refuse_broken(self) -> None:
        """Refuse to wait after an exception from outside has interrupted a change.

        Raises:
            ClosedError: names the exception.
        """
        if self.broken_by is not None:
            raise ClosedError(
                f"{type(self.broken_by).__name__}, thrown into this thread from outside, has "
                f"interrupted the engine while it was changing its own state, so its tasks are "
                f"lost: end its `with`, and open a new one (of a trainer: load the last checkpoint)"
            ) from self.broken_by

    def mend(self) -> None:
        """After such an exception, wait until the lanes are idle, and forget all tasks."""
        if self.broken_by is None:
            return
        self.wait_for_lanes()
        lost, count = self.scheduler.lost, len(self.devices)
        self._forgotten = self.scheduler.graph.submitted + 1
        self.scheduler = Scheduler(count, bound_only=count, first=self._forgotten)
        for lane in lost:
            self.scheduler.lose(lane)
        self._failed.clear()
        self._waiters.clear()
        self.broken_by = None

    def _act(self, decisions: Decisions) -> object:
        """Carry out decisions of the scheduler; called with the lock held.

        Returns:
            What is not needed any more, to be freed without the lock.
        """
        left: list[object] = [decisions]
        for lane, task in decisions.starts:
            assert self._lanes is not None
            task.ran_on = lane
            self._lanes.put(lane, functools.partial(self._execute, task=task))
        for task in decisions.ends:
            if task.cause is task:
                self._record_failure(task)
            left.append(task.release())
            for ended in task.wakes:
                ended.release()
        if self._waiters and decisions.ends:
            unfinished = self.scheduler.graph.unfinished
            for waiter in [waiter for waiter in self._waiters if unfinished <= waiter[0]]:
                self._waiters.remove(waiter)
                waiter[1].release()
        return left

    def _record_failure(self, task: Task) -> None:
        if task.error is None:
            lane = task.lane if task.ran_on is None else task.ran_on
            device = "every device" if lane is None else self.devices[lane % len(self.devices)]
            task.error = DeviceLostError(
                f"{device} was lost, and {task.name!r} with it: use a different device"
            )
            if lane is not None:
                task.error.__cause__ = self._deaths.get(lane % len(self.devices))
            add_note(task.error, task.describe(device))
        if not task.seen:
            self._failed.add(task)


def _locked() -> threading.Lock:
    """Return a lock that a lane will release: unlike an event, an exception can't break it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release(lock: threading.Lock, lane: int) -> None:
    lock.release()


def _raised_by(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except BaseException as error:
        return error
    return None


def _submission(task: Task) -> Submission:
    """Return a task with what it depends on, checked before the graph is changed.

    Raises:
        InputError: the task is to read or write something that is no Var.
    """
    for place in (*task.reads, *task.writes):
        if not isinstance(place, Place):
            raise InputError(
                f"{task.name!r} can't read or write {shown(place)}: make it with engine.Var(...)"
            )
    if not task.sources:
        return task, (), task.reads, task.writes
    inputs = [source.task for source in task.sources if isinstance(source, Handle)]
    variables = [source for source in task.sources if isinstance(source, handles.Var)]
    return task, inputs, (*variables, *task.reads), task.writes
