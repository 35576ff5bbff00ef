"""Several steps in flight, or devices of several kinds: steps as tasks of the engine.

The dependencies of the tasks keep the order, and let a step's data be copied while the step before
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.batch import Batch
from evenstep.engine import Task
from evenstep.engine.graph import Place
from evenstep.engine.task import PLAIN
from evenstep.errors import InputError, PeerError
from evenstep.shard.forward_backward import OuterModelError
from evenstep.steps.pipeline import Pipeline
from evenstep.steps.step import Attempt, Step, StepLoss

LOOK_EVERY_S = 1.0
"""The seconds between two looks for a device that stands still."""


class OverlappedPipeline(Pipeline):
    """Several steps in flight, as tasks of the engine.

    A step's shards read the model and its end writes it, so the shards of the next step wait for
    the end, while the copies of the next step's examples do not.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        devices = self._engine.devices
        kinds = {(device.kind, device.threads) for device in devices}
        self._any_lane = len(kinds) == 1 and not devices[0].is_accelerator
        self._model = self._engine.Var(None, "the model")

    def submit(self, step: Step) -> StepLoss:
        """Begin a step; return a handle of its mean loss at once."""
        if self.steps:
            self._update.refuse_changed_outside()
        self._update.note_outside()
        return super().submit(step)

    def _start(self, step: Step) -> None:
        engine, executor, attempt = self._engine, self._executor, step.attempt
        if self._overlap and not self.steps:
            self._replicas.drop_gradients()
        executor.open(step)
        copies = self._copies(attempt) if self._overlap else {}
        shards = self._shards(attempt, copies)
        attempt.ending.task = self._writer(
            "update", self._end_in_task, step, *map(engine.handle, shards)
        )
        opens = [self._writer("open", self._open, step)] if self.steps else []
        if not opens:
            self._open(step)
        self.steps.append(step)
        self._progress.count(step)
        # Together, so that all of them are submitted or none.
        engine.submit_tasks([*copies.values(), *opens, *shards, attempt.ending.task])

    def _copies(self, attempt: Attempt) -> dict[int, Task]:
        """Return for each lane a task that copies its run's examples to its device."""
        engine = self._engine
        return {
            lane: Task(
                self._executor.copy,
                (attempt, shards, engine.devices[lane]),
                lane=engine.copy_lane(lane),
                name=f"copy shards [{shards[0]},{shards[-1] + 1})",
                category="copy",
                modes=PLAIN,
                story={"step": attempt.number},
                quiet=True,
            )
            for lane, shards in enumerate(attempt.work.runs)
            if shards
        }

    def _shards(self, attempt: Attempt, copies: Mapping[int, Task]) -> list[Task]:
        """Return a task for each lane, which computes shards when the copies are done.

        With accelerators, a lane waits for its own copies only: another device may stand still. It
        copies the shards itself that it takes from another lane.
        """
        engine = self._engine
        copied = {lane: engine.handle(task) for lane, task in copies.items()}
        waits_for_all = self._replicas.on_cpus
        return [
            Task(
                self._compute,
                (
                    attempt,
                    lane,
                    [run for owner, run in copied.items() if waits_for_all or owner == lane],
                ),
                lane=lane,
                name="shards",
                category="shards",
                reads=[self._model],
                modes=PLAIN,
                story={"step": attempt.number},
                quiet=True,
            )
            for lane in range(len(engine.devices))
            if lane not in engine.lost_lanes
        ]

    def _compute(self, attempt: Attempt, lane: int, copied: Sequence[Mapping[int, Batch]]) -> None:
        batches = {shard: batch for run in copied for shard, batch in run.items()}
        self._executor.compute(attempt, lane, batches if self._overlap else None)

    def _writer(self, name: str, function: Callable[..., None], step: Step, *after: Any) -> Task:
        """Return a task that writes the model.

        On CPUs of one kind any lane may run it, usually the one that finishes last, since it is
        awake. Otherwise it runs on the device that holds the user's module.
        """
        return Task(
            function,
            (step, *after),
            lane=None if self._any_lane else self._engine.first_lane,
            name=f"{name} {step.number}",
            category="step",
            writes=(self._model,),
            modes=PLAIN,
            story={"step": step.number},
            quiet=True,
        )

    def _renewed(self) -> Sequence[Place]:
        if self._replicas.on_cpus:
            return ()
        self._model = self._engine.Var(None, "the model")
        return (self._model,)

    def _open(self, step: Step) -> None:
        if not self._overlap:
            step.attempt.clock.data_are_ready()
        self._executor.take_opening(step.attempt)
        step.attempt.ending.has_opening = True
        if self._overlap:
            self._replicas.refuse_written()
            self._update.drop_left()

    def _end_in_task(self, step: Step, *shards: object) -> None:
        self._end(step)

    def _wait_for(self, step: Step) -> BaseException | None:
        engine, end = self._engine, step.attempt.ending.task
        assert end is not None
        while not engine.wait_for(end, timeout_s=LOOK_EVERY_S):
            self._executor.lose_stuck(step.attempt)
        engine.give_up_device_of(end)
        error = engine.failure_of(end) or self._changed_outside()
        early = not step.attempt.ending.committed or isinstance(error, PeerError)
        if self._overlap and early and not isinstance(error, OuterModelError | None):
            return self._written_meanwhile(error)
        return error

    def _changed_outside(self) -> BaseException | None:
        try:
            self._update.refuse_changed_outside()
        except InputError as changed:
            return changed
        return None

    def _written_meanwhile(self, error: BaseException) -> BaseException:
        """Return that the model was written to meanwhile, if that is why a shard failed."""
        try:
            self._replicas.refuse_written()
        except InputError as written:
            written.__cause__ = error
            return written
        return error

    def _close_oldest(self) -> None:
        super()._close_oldest()
        if not self.steps:
            self._update.show_left()

    def _forget(self) -> None:
        self._model = self._engine.Var(None, "the model")  # the writer of the old one failed
        super()._forget()

    def _reopen(self) -> None:
        super()._reopen()
        self._model = self._engine.Var(None, "the model")

    def _drain(self) -> None:
        self._engine.mend()
        for step in self.steps:
            if step.attempt.ending.task is not None and step.attempt.ending.task.was_submitted:
                self._engine.drain(step.attempt.ending.task)
