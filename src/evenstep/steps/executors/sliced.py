"""Computes one shard at a time, whose sliced layers all devices compute together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.batch import Batch, contiguous_runs
from evenstep.batch.assignment import Pace, ShardQueue
from evenstep.nn.slice_runners import Exchanged, SlicingDevices, SlicingStoppedError, runner_here
from evenstep.steps.executors.independent import IndependentExecutor
from evenstep.steps.step import Attempt


class SlicedExecutor(IndependentExecutor):
    """Computes one shard at a time, whose sliced layers all devices compute together.

    The first device of those that share the model's memory computes everything else. The others
    compute slices until it has no shard left.
    """

    joins_shards = False
    exchanged: Exchanged

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.exchanged = Exchanged()

    def assign(self, attempt: Attempt) -> None:
        """Give all shards to the first device, and the slices of their layers to all devices."""
        self._assign_to_all(attempt, self.pace)

    def _assign_evaluation(self, attempt: Attempt) -> None:
        self._assign_to_all(attempt, self._evaluation_pace)

    def _assign_to_all(self, attempt: Attempt, pace: Pace) -> None:
        work, devices, lost = attempt.work, self.engine.devices, self.engine.lost_lanes
        alive = [lane for lane in range(len(devices)) if lane not in lost]
        first = next((n for n in alive if devices[n].memory == devices[0].memory), None)
        if first is None:
            raise self.engine.lost_error(0, "no device is left that holds the model")
        work.one_lane = work.one_lane and self.replicas.all[first].has_run_backward
        work.runs = contiguous_runs(
            attempt.cut.part.run, [float(lane == first) for lane in range(len(devices))]
        )
        work.queue = ShardQueue(work.runs, pace, attempt.clock.shards, may_steal=False)
        if len(alive) > 1 and not work.one_lane and self.engine.side_by_side:
            members = {lane: devices[lane] for lane in (first, *alive)}  # the first device first
            work.slicing = SlicingDevices(members, self.exchanged)

    def compute(
        self, attempt: Attempt, lane: int, batches: Mapping[int, Batch] | None = None
    ) -> None:
        """Compute shards in the first device's lane, and slices of their layers in all others."""
        slicing = attempt.work.slicing
        if slicing is None:
            return super().compute(attempt, lane, batches)
        outside = runner_here.set(slicing)
        try:
            if lane == slicing.first:
                super().compute(attempt, lane, batches)
            else:
                slicing.help(lane)
        except SlicingStoppedError:  # the error is that of another lane
            return None
        except BaseException:
            attempt.drop()
            raise
        finally:
            runner_here.reset(outside)
            if lane == slicing.first:
                slicing.stop()
        return None

    def _stuck_lanes(self, attempt: Attempt, alive: set[int], after_s: float) -> list[int]:
        """Return the lanes that the others wait for."""
        stuck = super()._stuck_lanes(attempt, alive, after_s)
        return stuck if attempt.work.slicing is None else attempt.work.slicing.keeping(stuck)

    def shards_per_s(self) -> float:
        """Return the shards a second of all devices together; 0 until one was measured."""
        return max((1 / took for took in self.pace.seconds if took), default=0.0)
