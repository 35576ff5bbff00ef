"""Computes the shards of a batch on devices that each have one stage of the network."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from evenstep.batch import Batch, contiguous_runs
from evenstep.devices import Device, StagedDevice, accelerator
from evenstep.engine.task import is_device_failure
from evenstep.errors import DeviceLostError, add_note
from evenstep.profiling.clock import NodeTime, ShardTime, StepClock
from evenstep.replicas import Replica, Replicas
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.gradients import GradientStream
from evenstep.shard.lockstep import StoppedError, shard_here
from evenstep.shard.loss import ShardLoss, ShardObjective
from evenstep.shard.partial_sum import Add, PartialSum, add
from evenstep.stages.balance import balanced_stages, parts_of
from evenstep.stages.check import check_graph
from evenstep.stages.plan import StagePlan, stages_of
from evenstep.stages.shard import StagedShard, hook_stages
from evenstep.stages.sums import StageBucket, StageSums
from evenstep.stages.timing import measure_parts
from evenstep.stages.turns import FreeTurns, StagedShards, Turns
from evenstep.stages.visits import LaunchedVisits, Visit, Visits
from evenstep.steps.executors import IndependentExecutor, explain
from evenstep.steps.groups.group import Group
from evenstep.steps.reducer import LocalReducer, sparse_parameters
from evenstep.steps.step import Attempt, Step

logger = logging.getLogger("evenstep")


class StagedReducer(LocalReducer):
    """Reduces steps inside a single process, whose gradients are summed stage by stage.

    Args:
        replicas: the replicas of the model.
        stages: returns the stages of the network.
    """

    def __init__(self, replicas: Replicas, stages: Callable[[], StagePlan]) -> None:
        self._replicas = replicas
        self._stages = stages
        self._sums = weakref.WeakKeyDictionary[Attempt, StageSums]()

    def begin(self, attempt: Attempt, add: Add, *, may_stream: bool) -> GradientStream | None:
        """Give an attempt its tree; return what takes gradients during backward passes, if any."""
        super().begin(attempt, add, may_stream=may_stream)
        if not may_stream:
            return None
        assert attempt.sum.tree is not None
        sparse = sparse_parameters(self._replicas.home.module)
        stages = self._stages()
        numbers: list[list[int]] = [[] for _ in range(stages.count)]
        for number, stage in enumerate(stages.of_parameter):
            if number not in sparse:
                numbers[stage].append(number)
        sums = self._sums[attempt] = StageSums([StageBucket(own) for own in numbers if own])
        return GradientStream(attempt.sum.tree.plan, sums, may_retry=True)

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
    are under way. On accelerators, whose kernels run later, no thread waits for a turn: each has
    streams of its own on all devices of the replica.

    Args:
        given: the arguments of `IndependentExecutor`.
        stages: the stages of the network.

    Attributes:
        stages: the same, or those that were measured.
        cut_by_time: the module that begins each stage, if these were chosen by time.
    """

    joins_shards = False

    def __init__(self, *given: Any, stages: StagePlan) -> None:
        super().__init__(*given)
        self.stages = stages
        count = stages.count
        self._place = [self._place[lane - lane % count] for lane in range(len(self._place))]
        self._now: list[StagedShard | None] = [None] * len(self.engine.devices)  # by lane
        self._stuck: dict[int, tuple[int, str]] = {}  # by lane: the stage, and what stood still
        self._hooks: list[RemovableHandle] = []
        self._lane_of: dict[nn.Module, int] = {}
        self._checked: dict[int, ShardObjective] = {}  # by lane, with its replica of now
        self.replicas.on_build = self._hook
        self._hook()

    def join(self, group: Group) -> None:
        """Compute steps with the processes of a group; alone, sum gradients stage by stage."""
        super().join(group)
        if group.is_alone and not self.replicas.home.device.is_accelerator:
            self.reducer = StagedReducer(self.replicas, lambda: self.stages)

    @property
    def stage_names(self) -> Mapping[str, int]:
        """The stage that each named module begins."""
        return self.stages.first

    # ---- assigned

    def open(self, step: Step) -> None:
        """Prepare the current attempt at a step; before the first one, measure stages."""
        if self.stages.await_times:
            self._choose_by_time(step)
        super().open(step)
        attempt = step.attempt
        watched = functools.partial(self._objective, step.objective)
        compute: Any = attempt.work.compute
        attempt.work.compute = functools.partial(compute, objective=watched)

    def assign(self, attempt: Attempt) -> None:
        """Give every replica of the model the same number of shards."""
        count = self.stages.count
        for lane in sorted(self.engine.lost_lanes):
            stage, _ = self._stuck.get(lane, (lane % count, ""))
            raise DeviceLostError(
                f"{self._device(lane, stage)} was lost, and with it stage {stage} of the network: "
                f"save, and resume with Trainer.load on other devices, or without stages"
            )
        replicas = len(self.engine.devices) // count
        runs = contiguous_runs(attempt.cut.part.run, [1.0] * replicas)
        attempt.work.one_lane = False
        attempt.work.runs = [run if not stage else [] for run in runs for stage in range(count)]
        launches = self.engine.devices[0].is_accelerator
        make_turns = FreeTurns if launches else functools.partial(Turns, count)
        attempt.work.turns = StagedShards(runs, make_turns)

    def _assign_evaluation(self, attempt: Attempt) -> None:
        self.assign(attempt)

    def _stuck_lanes(self, attempt: Attempt, alive: set[int], after_s: float) -> list[int]:
        """Return the lanes whose shards take too long in one stage while another lane waits."""
        shards = {lane: shard for lane in alive if (shard := self._now[lane]) is not None}
        working_s = {lane: shard.working_s for lane, shard in shards.items()}
        limit_s = self.pace.limit_s(after_s)
        waits_for_turns = not self.engine.devices[0].is_accelerator
        if waits_for_turns and all(working_s.get(lane) for lane in alive):
            return []
        stuck = [lane for lane, own_s in working_s.items() if own_s > limit_s]
        for lane in stuck:
            shard, stage = shards[lane], shards[lane].unfinished.stage
            story = f"shard {shard.number} stood still on {self._device(lane, stage)}"
            where = shard.whereabouts if waits_for_turns else f"in stage {stage}"
            self._stuck[lane] = stage, f"{story}, {where}"
            _shards_of(attempt).stop()  # others may wait for its turn to end
        return stuck

    def explain_loss(self, error: BaseException) -> None:
        """Note in which stage a shard stood still."""
        if isinstance(error, DeviceLostError):
            for _, story in self._stuck.values():
                if story:
                    add_note(error, story)

    def _hook(self) -> None:
        """Have the modules of all replicas change the stage, after they were made (again)."""
        for hook in self._hooks:
            hook.remove()
        self.stages = self.stages.again(self.replicas.home.module)
        self._lane_of, self._checked, self._hooks = {}, {}, []
        for lane in range(len(self.engine.devices)):
            replica = self._replica(lane)
            self._lane_of[replica.module] = lane
            shard_now = functools.partial(self._now.__getitem__, lane)
            make_other = None
            if isinstance(replica.device, StagedDevice):
                make_other = functools.partial(self._shard, lane, -1, FreeTurns(), _ignore)
            self._hooks += hook_stages(replica, self.stages, shard_now, make_other)
        self.engine.trace.facts["stages"] = {**self.stages.first}

    def _replica(self, lane: int) -> Replica:
        return self.replicas.of_lane(*divmod(lane, self.stages.count))

    # ---- chosen by time

    def take_cut(self, cut_by_time: Mapping[str, int]) -> None:
        """Use the stages of a checkpoint, if stages by time were asked for, and as many of them."""
        numbers = [*range(self.stages.count)]
        if self.stages.await_times and sorted({*cut_by_time.values()}) == numbers:
            self._use_cut(cut_by_time)

    def _choose_by_time(self, step: Step) -> None:
        """Cut the network into stages of about equal times, as the step's first shard takes them.

        Raises:
            Exception: the shard can't be computed; the step would fail with the same error.
        """
        model, run = self.replicas.home.module, step.attempt.cut.part.run
        if not run:  # this process has nothing to measure
            self.stages = dataclasses.replace(self.stages, await_times=False)
            return
        names = [*parts_of(model)]
        parts = stages_of(model, {name: number for number, name in enumerate(names)}, len(names))
        seconds = self._measured(step, run[0], parts)
        self._timekeeper.rest()
        self._use_cut(balanced_stages(dict(zip(names, seconds, strict=True)), self.stages.count))
        times = [0.0] * self.stages.count
        for name, part_s in zip(names, seconds, strict=True):
            times[self.stages.of_module[name]] += part_s
        logger.info(
            "stages of about equal times: %s",
            ", ".join(
                f"{name} begins stage {stage} ({1e3 * times[stage]:.1f} ms a shard)"
                for name, stage in self.cut_by_time.items()
            ),
        )

    def _use_cut(self, cut_by_time: Mapping[str, int]) -> None:
        model = self.replicas.home.module
        self.stages = stages_of(model, cut_by_time, self.stages.count)
        self.cut_by_time = self.stages.first
        self._hook()

    def _measured(self, step: Step, shard: int, parts: StagePlan) -> list[float]:
        """Return the seconds of each part of the network, measured in the first device's lane."""
        task = self.engine.run_and_wait(
            self._measure,
            step.attempt,
            step.objective,
            shard,
            parts,
            name="measure the parts of the network",
            category="measure",
        )
        if task.error is not None:
            raise task.error
        seconds: list[float] = task.result
        return seconds

    def _measure(
        self, attempt: Attempt, objective: ShardObjective, shard: int, parts: StagePlan
    ) -> list[float]:
        self.replicas.open_step()
        lane = self.engine.lane_here
        replica = self._replica(lane)
        outside = shard_here.set("apart" if attempt.cut.filled > 1 else None)
        try:
            work = self._work(replica, lane, attempt, shard, None)
            return measure_parts(replica, work, objective, parts)
        except BaseException as error:
            explain(error, attempt, shard, replica, self._device(lane, 0))
            raise
        finally:
            shard_here.reset(outside)

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
            attempt.work.results[number] = attempt.work.compute(replica, work)
            if attempt.cut.shared:
                attempt.cut.refuse_written_copies()
        except StoppedError:
            raise
        except BaseException as error:
            attempt.drop()
            device = self._device(lane, shard.place.stage)
            if is_device_failure(error):
                device = self._failed(lane) or device
            explain(error, attempt, number, replica, device)
            add_note(error, shard.whereabouts)
            raise
        finally:
            self._now[lane] = None
            shard.end()

    def _begin(self, attempt: Attempt, lane: int, number: int) -> StagedShard:
        count, times = self.stages.count, attempt.clock.shards
        first = lane - lane % count

        def note(visit: Visit) -> None:
            (stage, backward), began_s, ended_s = visit
            times.append(ShardTime(first + stage, number, False, began_s, ended_s, stage, backward))

        shard = self._shard(lane, number, _shards_of(attempt).turns[lane // count], note)
        self._now[lane] = shard
        return shard

    def _shard(
        self, lane: int, number: int, turns: Turns, note: Callable[[Visit], object]
    ) -> StagedShard:
        device = self._device(lane, 0)
        if not isinstance(device, StagedDevice):
            return StagedShard(number, turns, Visits(note), own_memory=device.own_memory)
        devices = [one.torch_device for one in device.stages]
        visits = LaunchedVisits(note, devices)
        return StagedShard(number, turns, visits, devices=devices, own_memory=True, returns=True)

    def _failed(self, lane: int) -> Device | None:
        """Return the device of a replica that refuses every call; note its stage."""
        for stage in range(self.stages.count):
            device = self._device(lane, stage)
            if device.is_accelerator and accelerator.has_failed(device.torch_device):
                self._stuck[lane] = stage, ""
                return device
        return None

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
                if isinstance(replica.device, StagedDevice):
                    shard.refuse_uses_beside_copies(total)
                else:
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


def _ignore(visit: Visit) -> None:
    """Take a visit outside of steps down nowhere."""


def _shards_of(attempt: Attempt) -> StagedShards:
    assert isinstance(attempt.work.turns, StagedShards)
    return attempt.work.turns
