"""Computes the shards of a batch on devices that each have one stage of the network."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from evenstep.batch import Batch, contiguous_runs
from evenstep.devices import Device
from evenstep.engine import Engine
from evenstep.errors import DeviceLostError, add_note
from evenstep.experiment import Experiment
from evenstep.profiling.clock import NodeTime, ShardTime, StepClock, Timekeeper
from evenstep.replicas import Replica, Replicas
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.gradients import GradientStream
from evenstep.shard.lockstep import StoppedError, shard_here
from evenstep.shard.loss import ShardLoss, ShardObjective
from evenstep.shard.partial_sum import Add, PartialSum, add
from evenstep.stages.check import check_graph
from evenstep.stages.plan import Stages
from evenstep.stages.shard import StagedShard, Visit, hook_stages
from evenstep.stages.sums import StageBucket, StageSums
from evenstep.stages.turns import StagedShards
from evenstep.steps.executors import IndependentExecutor, explain
from evenstep.steps.groups.group import Group
from evenstep.steps.reducer import LocalReducer, loose_parameters
from evenstep.steps.step import Attempt, Step


class StagedReducer(LocalReducer):
    """Reduces steps inside a single process, whose gradients are summed stage by stage.

    Args:
        replicas: the replicas of the model.
        stages: returns the stages of the network.
    """

    def __init__(self, replicas: Replicas, stages: Callable[[], Stages]) -> None:
        self._replicas = replicas
        self._stages = stages
        self._sums = weakref.WeakKeyDictionary[Attempt, StageSums]()

    def begin(self, attempt: Attempt, add: Add, *, may_stream: bool) -> GradientStream | None:
        """Give an attempt its tree; return what takes gradients during backward passes, if any."""
        super().begin(attempt, add, may_stream=may_stream)
        if not may_stream:
            return None
        assert attempt.tree is not None
        loose = loose_parameters(self._replicas.home.module)
        stages = self._stages()
        numbers: list[list[int]] = [[] for _ in range(stages.count)]
        for number, stage in enumerate(stages.of_parameter):
            if number not in loose:
                numbers[stage].append(number)
        sums = self._sums[attempt] = StageSums([StageBucket(own) for own in numbers if own])
        return GradientStream(attempt.tree.plan, sums, may_retry=True)

    def reduce(self, step: Step) -> tuple[Sequence[Leaf | None], PartialSum]:
        """Return every shard's (total, count), and the root, when all own shards are done."""
        leaves, root = super().reduce(step)
        sums = self._sums.pop(step.attempt, None)
        for number, gradient in sums.gradients.items() if sums else ():
            root.gradients[number] = gradient
        return leaves, root


class StagedExecutor(IndependentExecutor):
    """Computes each shard on several devices in turn, one for each stage of the network.

    The devices r S to r S + S − 1 have the stages 0 to S − 1 of replica r. Each of their S threads
    computes one shard after another, with a copy of the module's layers; it computes only while it
    is the shard's turn on the stage's device (`stages/turns.py`). So at most S shards of a replica
    are under way.

    Args:
        stages: the stages of the network.
    """

    def __init__(
        self,
        experiment: Experiment,
        replicas: Replicas,
        engine: Engine,
        timekeeper: Timekeeper,
        group: Group,
        stages: Stages,
    ) -> None:
        super().__init__(experiment, replicas, engine, timekeeper, group)
        self.stages = stages
        self._now: list[StagedShard | None] = [None] * len(engine.devices)  # by lane
        self._hooked: list[Replica] = []
        self._lane_of: dict[nn.Module, int] = {}
        self._checked: dict[int, ShardObjective] = {}  # by lane, with its replica of now

    @property
    def group(self) -> Group:
        """The processes that train together."""
        return self._group

    @group.setter
    def group(self, group: Group) -> None:
        if group.is_alone:
            group.reducer = StagedReducer(self.replicas, lambda: self.stages)
        self._group = group

    # ---- assigned

    def open(self, step: Step) -> None:
        """Prepare the current attempt at a step."""
        self._hook()
        super().open(step)
        attempt = step.attempt
        watched = functools.partial(self._objective, step.objective)
        compute: Any = attempt.compute
        attempt.compute = functools.partial(compute, objective=watched)

    def assign(self, attempt: Attempt) -> None:
        """Give every replica of the model the same number of shards."""
        lost = ", ".join(str(self.engine.devices[lane]) for lane in sorted(self.engine.lost_lanes))
        if lost:
            raise DeviceLostError(
                f"{lost} was lost, and with it a stage of the network: save, and resume with "
                f"Trainer.load on other devices, or without stages"
            )
        self._hook()
        count = self.stages.count
        replicas = len(self.engine.devices) // count
        runs = contiguous_runs(attempt.cut.part.run, [1.0] * replicas)
        attempt.alone = False
        attempt.runs = [run if not stage else [] for run in runs for stage in range(count)]
        attempt.turns = StagedShards(count, runs)

    def _assign_evaluation(self, attempt: Attempt) -> None:
        self.assign(attempt)

    def _hook(self) -> None:
        """Have the modules of all replicas change the stage, after they were made (again)."""
        if self._hooked is self.replicas.all:
            return
        self.stages = self.stages.again(self.replicas.home.module)
        self._lane_of, self._checked = {}, {}
        for lane in range(len(self.engine.devices)):
            replica = self._replica(lane)
            self._lane_of[replica.module] = lane
            hook_stages(replica, self.stages, functools.partial(self._now.__getitem__, lane))
        self._hooked = self.replicas.all

    def _replica(self, lane: int) -> Replica:
        return self.replicas.of_lane(*divmod(lane, self.stages.count))

    # ---- computed

    def compute(
        self, attempt: Attempt, lane: int, batches: Mapping[int, Batch] | None = None
    ) -> None:
        """Compute shards in the calling lane, each on all of the replica's devices in turn."""
        number, shards = lane // self.stages.count, _shards_of(attempt)
        outside = shard_here.set("apart" if attempt.cut.filled > 1 else None)
        try:
            while (shard := shards.next(number)) is not None:
                began_s = time.perf_counter()
                self._compute_one(attempt, lane, shard, batches)
                self.pace.learn(lane, time.perf_counter() - began_s)
        except StoppedError:  # another shard has failed
            pass
        finally:
            shard_here.reset(outside)

    def _compute_one(
        self, attempt: Attempt, lane: int, number: int, batches: Mapping[int, Batch] | None
    ) -> None:
        replica = self._replica(lane)
        shard = self._begin(attempt, lane, number)
        try:
            shard.begin()
            work = self._work(replica, lane, attempt, number, batches)
            attempt.results[number] = attempt.compute(replica, work)
            if attempt.cut.shared:
                attempt.cut.refuse_written_copies()
        except StoppedError:
            raise
        except BaseException as error:
            attempt.drop()
            device = self._device(lane, shard.place.stage)
            explain(error, attempt, number, replica, device)
            module = f", in the module {shard.module!r} or after it" if shard.module else ""
            add_note(error, f"in stage {shard.place.stage}{module}")
            raise
        finally:
            self._now[lane] = None
            shard.end()

    def _begin(self, attempt: Attempt, lane: int, number: int) -> StagedShard:
        count, times = self.stages.count, attempt.clock.shards
        first = lane - lane % count

        def note(visit: Visit) -> None:
            shard, (stage, backward), began_s, ended_s = visit
            times.append(ShardTime(first + stage, shard, False, began_s, ended_s, stage, backward))

        shard = StagedShard(
            number,
            _shards_of(attempt).turns[lane // count],
            note,
            own_memory=self._device(lane, 0).own_memory,
        )
        self._now[lane] = shard
        return shard

    def _device(self, lane: int, stage: int) -> Device:
        return self.engine.devices[lane - lane % self.stages.count + stage]

    def _objective(
        self, objective: ShardObjective, model: nn.Module, batch: Batch, examples: int | None
    ) -> ShardLoss:
        """Compute a shard's loss, and prepare its backward pass through the stages."""
        loss = objective(model, batch, examples)
        lane = self._lane_of[model]
        replica, shard, total = self._replica(lane), self._now[lane], loss[0]
        if shard is not None and total.requires_grad:
            if self._checked.get(lane) is not objective:
                check_graph(shard, total, replica, self.stages)
                self._checked[lane] = objective
            shard.forward_ends(total)
        return loss

    def _add(self, clock: StepClock, left: PartialSum, right: PartialSum) -> PartialSum:
        """Add two children of a node, and note the time and the device whose turn it is."""
        began_s = time.perf_counter()
        lo, hi, lane = left.lo, right.hi, self.engine.lanes.here
        node, shard = add(left, right), self._now[lane]
        if shard is not None:
            lane += shard.place.stage - lane % self.stages.count
        clock.nodes.append(NodeTime(lane, lo, hi, began_s, time.perf_counter()))
        return node


def _shards_of(attempt: Attempt) -> StagedShards:
    assert isinstance(attempt.turns, StagedShards)
    return attempt.turns
