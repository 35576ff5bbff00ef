"""The order of steps: submitted, waited for oldest first, attempted again or abandoned.

`DirectPipeline` takes one step at a time, and gives it straight to the lanes of the devices. The
pipeline for several steps in flight, and for GPUs, is in `in_flight`.
"""

from __future__ import annotations

import abc
import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenstep.batch.assignment import OneLaneChoice
from evenstep.contract import refuse_modes
from evenstep.devices.accelerator import autocast_kinds
from evenstep.devices.forward_mode import refuse_inside_a_level
from evenstep.distributed.step_report import AgainError
from evenstep.engine import streams
from evenstep.engine.graph import Place
from evenstep.engine.interrupts import INTERRUPTS, POLL_S, interruptible
from evenstep.engine.lanes import has_own_modes
from evenstep.engine.task import PLAIN, Task, is_device_failure
from evenstep.errors import DeviceLostError, InputError
from evenstep.profiling.clock import ADD_UP_EVERY, Timekeeper
from evenstep.shard.partial_sum import at_home
from evenstep.steps.executors import IndependentExecutor
from evenstep.steps.failures import Recovery
from evenstep.steps.step import Attempt, Progress, Step, StepLoss
from evenstep.steps.update import Update


class Pipeline(abc.ABC):
    """The steps that are not finished, oldest first.

    Args:
        executor: computes the shards of a step.
        update: ends steps.
        timekeeper: receives the times of finished steps.
        progress: goes back when steps are abandoned.
        max_in_flight: how many steps may be unfinished at once.

    Attributes:
        steps: the steps that are not finished.
    """

    def __init__(
        self,
        executor: IndependentExecutor,
        update: Update,
        timekeeper: Timekeeper,
        progress: Progress,
        *,
        max_in_flight: int,
    ) -> None:
        self.steps: deque[Step] = deque()
        self._thread = threading.get_ident()  # that began the last step
        self._left_an_update = False
        self._executor = executor
        self._engine = executor.engine
        self._replicas = executor.replicas
        self._update = update
        self._timekeeper = timekeeper
        self._progress = progress
        self._overlap = max_in_flight > 1
        self._recovery = Recovery(executor)
        self._autocast_kinds = autocast_kinds()
        home, devices = self._replicas.home.device, self._engine.devices
        self._others_may_fail = any(
            one.is_accelerator and one.memory != home.memory for one in devices
        )

    # ---- before a step

    def make_room(self, leave: int, *, may_be_written: bool) -> None:
        """Wait until at most `leave` steps are in flight, and bring the replicas up to date.

        Args:
            leave: the number of steps.
            may_be_written: whether the user may have written to the parameters past torch's version
                counters since the replicas were brought up to date.

        Raises:
            DeadlockError: the caller is a task.
            InputError: the caller's autocast, or a mode of torch, would not reach the lanes.
            DeviceLostError: a device was given up that training needs.
        """
        self.refuse_here()
        if self._engine.broken_by is not None:
            self._engine.mend()
        if self.steps:
            may_compile = self._executor.programs is not None  # beside nothing in flight
            self.wait(leave=0 if may_compile else leave)
        if self.steps and (self._replicas.is_outdated or self._update.is_outdated):
            self.wait()
        if not self.steps:
            if may_be_written:
                self._replicas.mark_written()
            self.follow_user()

    def refuse_here(self) -> None:
        """Refuse to compute for a caller whose settings the lanes don't have, or in a lane."""
        engine = self._engine
        if self._executor.side_by_side or threading.get_ident() in engine.lanes.threads:
            engine.refuse_inside("take a step, or evaluate")
        if any(map(torch.is_autocast_enabled, self._autocast_kinds)):
            raise InputError(
                "torch.autocast around a step is not propagated to the worker threads: use "
                'Trainer(precision="bf16") instead'
            )
        if engine.given_up:
            self.refuse_given_up()
        if has_own_modes():
            refuse_modes(engine.devices[0].torch_device, self._executor.experiment.arithmetic)

    def follow_user(self) -> None:
        """Bring replicas and update up to what the user did to the model and the optimizer."""
        if self._replicas.refresh():
            while not self._have_copies():
                pass
        self._update.follow_user()

    def _have_copies(self) -> bool:
        """Update the copies of the parameters; False if a device is lost meanwhile: try again."""
        try:
            self.run_in_first_lane(self._update.update_copies)
        except Exception as error:
            if not self._executor.goes_on_after(error, "the copying of the parameters"):
                raise
            return False
        return True

    def _renewed(self) -> Sequence[Place]:
        """Return new places for a task to write that later shards read; no step is in flight."""
        return ()

    def run_in_first_lane(self, function: Callable[[], None]) -> None:
        """Run `function` where the update is done, and wait for it, also if Ctrl-C is pressed."""
        first = self._engine.first_lane
        task = Task(function, lane=first, writes=self._renewed(), modes=PLAIN, quiet=True)
        self._engine.submit_tasks([task])
        self._engine.drain(task, gives_up=False)
        if task.error is not None:
            self._engine.give_up_device_of(task)
            self._renewed()  # for what it has written, later tasks would fail too
            raise task.error
        streams.wait_for([task.fence], self._engine.devices[first])

    def refuse_given_up(self) -> None:
        """Refuse to go on if a device is at work that was given up, and that training needs."""
        engine = self._engine
        if not engine.given_up:
            return
        may_go_on = self._replicas.drop_lanes(engine.lost_lanes)
        if self._left_an_update or not may_go_on:
            lost = ", ".join(str(engine.devices[lane]) for lane in sorted(engine.given_up))
            raise DeviceLostError(
                f"Ctrl-C was pressed again while {lost} was still busy with the model, and "
                f"evenstep did not wait for it: load the last checkpoint in a new process"
            )

    # ---- steps, begun and waited for

    def submit(self, step: Step) -> StepLoss:
        """Count and begin a step; return a handle of its mean loss at once.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the step and those before it were abandoned.
        """
        self._thread = threading.get_ident()
        if self._replicas.hooked:
            step.hooks = self._replicas.hooks_now()
        try:
            self._start(step)
        except BaseException as error:
            self.abandon(error)
            self._give_up([] if step.is_taken or step.error else [step], error)
            raise
        if not self._overlap:
            self.wait()
        return StepLoss(step, self.wait_until)

    def take_now(self, step: Step) -> StepLoss:
        """Begin a step and wait for it; after an error, wherever it came, it is abandoned."""
        try:
            loss = self.submit(step)
            self.wait()
            return loss
        except BaseException as error:
            self.abandon(error)
            raise

    def wait(self, *, leave: int = 0) -> None:
        """Wait for the oldest steps until at most `leave` are unfinished.

        Raises:
            Exception: the error of a step; that step and those after it are abandoned.
        """
        while len(self.steps) > leave:
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for every step; afterwards the user may read and change model and optimizer."""
        INTERRUPTS.follow()
        self.wait()
        self.refuse_given_up()
        self._update.give_back()
        self._replicas.mark_written()
        self._timekeeper.rest()

    @INTERRUPTS.uninterrupted
    def wait_until(self, step: Step) -> None:
        """Wait until `step` is finished; raise as `wait` does.

        A thread that takes no steps, such as a log's, only reads what is there.
        """
        if step.finished and threading.get_ident() != self._thread:
            return
        if step in self.steps:
            self._engine.refuse_inside(f"wait for step {step.number}")
        while step in self.steps:
            self._finish_oldest()

    def abandon(self, error: BaseException) -> None:
        """Drop the steps whose update has not begun, and leave the model as it was before them."""
        try:
            self._abandon(error)
        except BaseException:  # maybe thrown into this thread, and has cut that off
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        self._drop_all()
        self._left_an_update |= bool(self._engine.given_up) and any(
            step.attempt.ending.committed and not step.finished for step in self.steps
        )
        while self.steps and self.steps[0].is_taken:
            if not self.steps[0].finished:
                self._reopen()
            self._close_oldest()
        if not self.steps:
            return
        steps = [*self.steps]
        own = steps[0].own
        self._give_up(steps, error)
        self._forget()
        self._show_own(own)
        interruptible(self._executor.reducer.announce_failure, steps[0], error)

    def _finish_oldest(self) -> None:
        step = self.steps[0]
        if threading.get_ident() in self._engine.lanes.threads:
            self._engine.refuse_inside(f"wait for step {step.number}")
        if self._overlap:
            refuse_inside_a_level("the wait for a step in flight")
        try:
            error = self._wait_for(step)
            shall_retry = error is not None and self._recovery.can_retry(step, error)
        except BaseException as interrupt:  # Ctrl-C
            self.abandon(interrupt)
            raise
        if step not in self.steps:  # a handler of a signal has waited for it
            if step.error is not None:
                raise step.error
        elif error is None:
            self._close_oldest()
        elif shall_retry:
            self._retry()
        else:
            self._executor.explain_loss(error)
            self.abandon(error)
            raise error

    def _close_oldest(self) -> None:
        self.steps.popleft().release()

    def _retry(self) -> None:
        """Attempt all unfinished steps again, the oldest of which has failed."""
        steps = [*self.steps]
        try:
            self._drop_all()
            interruptible(self._executor.reducer.announce_retry, steps[0])
            self._forget()
            for step in steps:
                step.attempt = step.attempt.again()
                self._start(step)
        except BaseException as error:  # a process is gone, or Ctrl-C
            self.abandon(error)
            self._give_up([step for step in steps if not (step.is_taken or step.error)], error)
            raise

    def _give_up(self, steps: Sequence[Step], error: BaseException) -> None:
        """Note that `steps` are not taken."""
        if steps:
            self._show_own(steps[0].own)
        for step in steps:
            step.error = step.error or error
            step.release()
        if steps:
            self._progress.go_back(steps[0])
            self._update.renew()

    def _show_own(self, own: Sequence[torch.Tensor | None]) -> None:
        """Give the parameters the gradients of the user's own again that a step had."""
        for parameter, gradient in zip(self._replicas.home.parameters, own, strict=False):
            parameter.grad = gradient

    def _forget(self) -> None:
        if not self.steps[0].attempt.ending.has_opening:  # what is there is of the step before
            self._reopen()
        self._replicas.abandon_step()
        self.steps.clear()

    def _reopen(self) -> None:
        """Go on from a step whose update was made, though what came behind it has failed."""
        self._replicas.open_step()

    def _drop_all(self) -> None:
        """Let nothing begin that has not begun, and wait for what runs."""
        for step in self.steps:
            step.attempt.drop()
        self._drain()

    # ---- the end of a step, in a lane

    @INTERRUPTS.shielded
    def _end(self, step: Step) -> None:
        """Reduce a step whose own shards are done, and update the model."""
        began_s, attempt = time.perf_counter(), step.attempt
        self._replicas.refuse_written_by_shards()
        attempt.commit()
        try:
            leaves, root = self._executor.reducer.reduce(step)
            root = at_home(root, self._replicas.home)
            if self._others_may_fail and self._executor.group.is_alone:
                self._refuse_failed()
        except BaseException as error:
            is_unreported = is_device_failure(error) and not attempt.ending.reported
            attempt.ending.committed = not (is_unreported or isinstance(error, AgainError))
            raise
        step.finish(step, leaves, root)
        step.finished = True
        attempt.clock.update = (self._engine.lanes.here, began_s, time.perf_counter())
        self._timekeeper.ended.append((step.number, attempt.clock))
        if len(self._timekeeper.ended) > ADD_UP_EVERY:
            self._timekeeper.add_up()

    def _refuse_failed(self) -> None:
        """Refuse a sum that a failed accelerator was part of; another attempt does without it.

        Kernels that add or copy partial sums run after the end of a shard, which does not wait for
        them. All of them have run, or failed, when the sum is there.
        """
        home = self._replicas.home.device
        if home.is_accelerator:
            streams.finish([streams.fence_here(home)])
        self._engine.refuse_failed()

    # ---- what the two kinds of pipeline differ in

    @abc.abstractmethod
    def _start(self, step: Step) -> None:
        """Begin the current attempt at a step, behind those in flight."""

    @abc.abstractmethod
    def _wait_for(self, step: Step) -> BaseException | None:
        """Wait for the end of the oldest step; return what it failed with."""

    @abc.abstractmethod
    def _drain(self) -> None:
        """Wait for everything that was begun, also if Ctrl-C is pressed.

        Pressed again, it gives up the devices that are still at work.
        """


class DirectPipeline(Pipeline):
    """One step at a time: every lane computes its shards, the last one to finish ends the step."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._one_lane = OneLaneChoice()

    def _start(self, step: Step) -> None:
        attempt, executor, lanes = step.attempt, self._executor, self._engine.lanes
        work, ending = attempt.work, attempt.ending
        work.one_lane = len(self._engine.devices) > 1 and self._one_lane.is_better()
        executor.open(step)
        attempt.clock.ready_s = attempt.clock.ready_s or time.perf_counter()
        executor.take_opening(attempt)
        ending.has_opening = True
        self.steps.append(step)
        self._progress.count(step)
        alive = set(range(len(self._engine.devices))) - self._engine.lost_lanes
        ending.working = {lane for lane in alive if work.runs[lane]} if work.one_lane else alive
        ending.lanes = frozenset(ending.working)
        for lane in ending.lanes:
            run = contextvars.copy_context().run
            lanes.put(lane, functools.partial(run, self._compute, step, attempt))  # type: ignore[call-arg]
        lanes.work()

    def _compute(self, step: Step, attempt: Attempt, lane: int) -> None:
        """Compute the calling lane's shards; the last lane ends the step."""
        ending = attempt.ending
        try:
            self._executor.compute(attempt, lane)
        except BaseException as error:
            ending.errors[lane] = error
        with ending.lock:
            ending.working.discard(lane)
            if ending.working:
                return
        try:
            if not ending.errors:
                self._end(step)
        except BaseException as error:
            ending.errors[lane] = error
        ending.is_over = True
        ending.ended.release()

    def _wait_for(self, step: Step) -> BaseException | None:
        attempt, ending = step.attempt, step.attempt.ending
        while not ending.is_over:
            if not ending.ended.acquire(timeout=POLL_S):
                self._give_up_lost(attempt)
            if INTERRUPTS.pending:
                INTERRUPTS.check()
        if len(self._engine.devices) > 1:
            assert attempt.clock.ready_s is not None
            self._one_lane.learn(attempt.work.one_lane, time.perf_counter() - attempt.clock.ready_s)
        return ending.errors[min(ending.errors)] if ending.errors else None

    def _give_up_lost(self, attempt: Attempt) -> None:
        """End an attempt in which a device stands still, or its thread has ended."""
        ending = attempt.ending
        dead = self._engine.dead_lanes & ending.lanes
        lost = self._executor.lose_stuck(attempt) | dead
        if lost:
            attempt.drop()
        if ending.dropped or dead:  # else its shard has ended just now, and the update has begun
            for lane in lost:
                ending.errors[lane] = self._engine.lost_error(lane)
                ending.is_over = True

    def _drain(self) -> None:
        self._engine.mend()
        self._engine.wait_for_lanes()
