"""Computes all shards of a step side by side, so that they can exchange values."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any, TypeVar

from evenstep.batch import Batch, contiguous_runs
from evenstep.batch.assignment import Pace
from evenstep.engine import streams
from evenstep.errors import DeviceError, DeviceLostError
from evenstep.options.experiment import Experiment
from evenstep.profiling.clock import ShardTime
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.lockstep import DeviceTurns, Lockstep, ShardInStep, Turn, shard_here
from evenstep.steps.executors.independent import IndependentExecutor, explain
from evenstep.steps.executors.sync_batch_norm import SyncedBatchNorm
from evenstep.steps.step import Attempt

T = TypeVar("T")


class LockstepExecutor(IndependentExecutor):
    """Computes all shards of a step side by side, so that they can exchange values.

    Every device runs one of its shards at a time, and switches to another one where a shard waits
    for the others. All devices get the same number of shards, and none is stolen.
    """

    side_by_side = True
    joins_shards = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._turns: dict[int, DeviceTurns] = {}  # by lane
        self._turn_pace = Pace(len(self.engine.devices))

    def assign(self, attempt: Attempt) -> None:
        """Give every device the same number of shards."""
        if attempt.cut.filled == 1:  # one shard alone is the whole batch
            return super().assign(attempt)
        lost = ", ".join(str(self.engine.devices[lane]) for lane in sorted(self.engine.lost_lanes))
        if lost:
            raise DeviceLostError(
                f"{lost} was lost, and with {lockstep_option(self.experiment)} the others would "
                f"wait for it: save, and resume with Trainer.load on other devices"
            )
        return self._assign_side_by_side(attempt)

    def _assign_evaluation(self, attempt: Attempt) -> None:
        """Evaluate side by side too, as long as all devices are there."""
        if attempt.cut.filled == 1 or self.engine.lost_lanes:
            return super()._assign_evaluation(attempt)
        return self._assign_side_by_side(attempt)

    def _assign_side_by_side(self, attempt: Attempt) -> None:
        attempt.work.runs = contiguous_runs(attempt.cut.part.run, [1.0] * len(self.engine.devices))
        attempt.work.lockstep = Lockstep(attempt.cut.filled)

    def compute(
        self, attempt: Attempt, lane: int, batches: Mapping[int, Batch] | None = None
    ) -> None:
        """Compute the shards of the calling lane's run, all of them in progress at once."""
        lockstep, runs = attempt.work.lockstep, attempt.work.runs
        shards = runs[lane] if runs else ()
        if lockstep is None:
            return super().compute(attempt, lane, batches)
        syncs = self.experiment.batch_norm == "sync"

        def note(turn: Turn) -> None:
            shard, began_s, ended_s = turn
            self._turn_pace.learn(lane, ended_s - began_s)
            attempt.clock.shards.append(ShardTime(lane, shard, False, began_s, ended_s))

        device = self.engine.devices[lane]
        turns = self._turns[lane] = DeviceTurns(note, device)
        replicas = [self.replicas.of_lane(lane, place) for place in range(len(shards))]
        opened, closed = streams.given_from(device, None), list[streams.Given]()

        def compute_one(replica: Replica, shard: int, seat: int) -> Leaf | None:
            in_step = ShardInStep(lockstep, shard, turns)

            def in_turn() -> Leaf:
                self.engine.adopt(lane, seat)
                streams.taken(opened, device)
                shard_here.set(in_step)  # in a thread of the shard's own
                try:
                    work = self._work(replica, lane, attempt, shard, batches)
                    with SyncedBatchNorm(in_step) if syncs else nullcontext():
                        leaf: Leaf = attempt.work.compute(replica, work)
                finally:
                    closed.append(streams.given_from(device, None))
                if attempt.cut.shared:
                    attempt.cut.refuse_written_copies()
                return leaf

            try:
                return in_step.run(in_turn)
            except BaseException as error:
                attempt.drop()
                explain(error, attempt, shard, replica, replica.device)
                raise

        found: list[Future[Leaf | None]] = []
        try:
            for seat, (replica, shard) in enumerate(zip(replicas, shards, strict=True)):
                found.append(_in_thread(functools.partial(compute_one, replica, shard, seat)))
        except RuntimeError as error:  # the system refuses another thread
            attempt.drop()  # those that have begun wait for the others
            wait(found)
            raise DeviceError(
                f"shard {shards[len(found)]} of {attempt.cut.filled} that run side by side "
                f"could not get a thread ({error}): use fewer shards"
            ) from error
        wait(found)
        for one in closed:
            streams.taken(one, device)
        results: dict[int, Any] = {
            shard: future.result() for shard, future in zip(shards, found, strict=True)
        }
        attempt.work.results.update(results)
        return None

    def _stuck_lanes(self, attempt: Attempt, alive: set[int], after_s: float) -> list[int]:
        """Return the lanes whose shard takes too long for a turn while another lane waits."""
        if attempt.work.lockstep is None:
            return super()._stuck_lanes(attempt, alive, after_s)
        turns = {lane: turn for lane in alive if (turn := self._turns.get(lane)) is not None}
        working_s = {lane: turn.working_s for lane, turn in turns.items()}
        limit_s = self._turn_pace.limit_s(after_s)
        if all(working_s.get(lane) for lane in alive):
            return []
        return [lane for lane, own_s in working_s.items() if own_s and own_s > limit_s]


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that the end of the program does not wait for."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fulfil, name="evenstep shard", daemon=True).start()
    return future


def lockstep_option(experiment: Experiment) -> str:
    """Return the trainer's option that has chosen to compute shards side by side."""
    return "batch_norm='sync'" if experiment.batch_norm == "sync" else "side_by_side=True"
