"""Computes the shards of a batch on the devices, each by itself, and takes them from slow ones."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from evenstep.batch import Batch, contiguous_runs, dealt_pairs
from evenstep.batch.advice import advice_on
from evenstep.batch.assignment import Pace, ShardQueue
from evenstep.batch.cut import Cut
from evenstep.contract.overlap import refuse_shared_outputs
from evenstep.devices import Device
from evenstep.engine import Engine, Task, streams
from evenstep.engine.interrupts import interruptible
from evenstep.engine.task import PLAIN, failure_behind, is_device_failure
from evenstep.errors import ContractError, add_note
from evenstep.nn.slice_runners import Exchanged
from evenstep.options.experiment import Experiment
from evenstep.private_torch.modules import has_forward_hooks
from evenstep.profiling.clock import NodeTime, StepClock, Timekeeper
from evenstep.replicas import Replica, Replicas
from evenstep.shard.compile_policy import ShardPrograms
from evenstep.shard.compiler import Program
from evenstep.shard.evaluation import Forward, Measure, Metric, measure_shard, predict_shard
from evenstep.shard.forward_backward import ShardWork, compute_shard
from evenstep.shard.lockstep import shard_here
from evenstep.shard.partial_sum import PartialSum, add
from evenstep.shard.together import Together
from evenstep.steps.executors.lost_devices import LostDevices
from evenstep.steps.groups.group import Group
from evenstep.steps.step import Attempt, Step

T = TypeVar("T")

_SHARDS_OF_A_CHECK = 12
_LOOK_EVERY_S = 1.0  # between two looks for a lane whose thread has ended


class IndependentExecutor:
    """Computes each shard by itself; devices that are done take shards from slower ones.

    Attributes:
        side_by_side: whether the shards of a step are in progress at the same time.
        cut_by_time: the module that begins each stage, if these were chosen by time.
        exchanged: what the devices have sent each other for slices; None without slices.
        experiment: the choices that the result depends on.
        replicas: the replicas of the model.
        engine: runs the work on the devices.
        group: the processes that train together.
        reducer: turns the partial sums of a step into one, here or in all processes.
        lost: gives up the devices that fail or stand still.
        adds_once: whether every backward pass so far added to each gradient at most once.
        programs: finds the compiled shards; None where shards are computed eagerly.
        joins_shards: whether shards of a device may be computed as one batch.
        together: computes shards so, in portable arithmetic; None in torch's own.
        pace: how fast each device computes shards.
    """

    side_by_side = False
    joins_shards = True
    cut_by_time: Mapping[str, int] = MappingProxyType({})
    exchanged: Exchanged | None = None

    def __init__(
        self,
        experiment: Experiment,
        replicas: Replicas,
        engine: Engine,
        timekeeper: Timekeeper,
        group: Group,
        lost: LostDevices,
    ) -> None:
        self.experiment = experiment
        self.replicas = replicas
        self.engine = engine
        self.join(group)
        self.lost = lost
        self.adds_once = True
        self.programs = ShardPrograms(experiment, replicas) if experiment.compile else None
        joins = experiment.arithmetic == "portable" and self.joins_shards
        self.together = Together() if joins else None
        self._deals = len({device.memory for device in engine.devices}) == 1 and not joins
        self.pace = Pace(len(engine.devices))
        self._autocast_dtype = experiment.autocast_dtype
        self._timekeeper = timekeeper
        self._evaluation_pace = Pace(len(engine.devices))
        self._checked_evaluations = set[Any]()
        self._place = [experiment.placement(device) for device in engine.devices]

    @property
    def stage_names(self) -> Mapping[str, int] | None:
        """The stage that each named module begins; None without stages."""
        return None

    def join(self, group: Group) -> None:
        """Compute steps with the processes of a group, from the next one on."""
        self.group = group
        self.reducer = group.reducer

    def take_cut(self, cut_by_time: Mapping[str, int]) -> None:
        """Use the stages of a checkpoint, where the network is divided by time."""

    # ---- training steps: opened, computed in every lane, closed

    def open(self, step: Step) -> None:
        """Prepare the current attempt at a step: its shards' work, and the sum over them."""
        attempt, work = step.attempt, step.attempt.work
        if self.programs is not None and step.may_compile:
            work.programs = self._programs_of(self.programs, step)
        stream = self.reducer.begin(
            attempt,
            functools.partial(self._add, attempt.clock),
            may_stream=not work.programs and self.adds_once and step.observe is None,
        )
        assert attempt.sum.tree is not None
        work.is_observed = step.observe is not None
        if self.replicas.home in self.replicas.all:  # else they are left until the update
            for parameter in self.replicas.home.parameters:
                parameter.grad = None
        work.compute = functools.partial(
            compute_shard,
            objective=step.objective,
            tree=attempt.sum.tree,
            stream=stream,
            may_accumulate=self.adds_once,
            observe=step.observe,
            finish=self._finish_kernels,
        )
        if self.together is not None and step.observe is not None:
            self.together.check_again()
        if self.together is not None and stream is None and step.observe is None and self.adds_once:
            work.compute_together = functools.partial(
                self.together.compute, objective=step.objective, tree=attempt.sum.tree
            )
        if self.engine.lost_lanes:
            self.lost.go_on_without_idle(f"step {step.number}")
        self.assign(attempt)

    def _programs_of(self, programs: ShardPrograms, step: Step) -> Mapping[int, Program]:
        before = programs.result
        found = interruptible(programs.of, step.attempt.cut, step.objective)
        if programs.result is not before:  # the time for compiling is no step's
            self._timekeeper.rest()
        return found

    def assign(self, attempt: Attempt) -> None:
        """Give every device a run of shards, as long as its measured speed deserves.

        Devices that share a memory get pairs of neighbours in turn, for the sake of the memory.

        In a step that is observed all speeds count as equal, and no shard is stolen, so that it
        does not depend on timing which device computes which shard.
        """
        work, speeds = attempt.work, self.pace.speeds(self.engine.lost_lanes)
        if not any(speeds):
            raise self.engine.lost_error(0, "no device is left, so open a new trainer")
        # Whether the model is refused on a new replica must not depend on timing.
        new = [lane for lane in range(len(speeds)) if not self.replicas.all[lane].has_run_backward]
        work.one_lane = work.one_lane and not new and not work.is_observed
        if work.is_observed:
            speeds = [float(speed > 0) for speed in speeds]
        if work.one_lane:
            fastest = speeds.index(max(speeds))
            speeds = [float(lane == fastest) for lane in range(len(speeds))]
        runs = contiguous_runs(attempt.cut.part.run, speeds)
        if not all(runs) and not work.one_lane:
            self.pace.decay(lane for lane, run in enumerate(runs) if not run)
        in_turn = self._deals and len(runs) > 1 and not work.one_lane
        if in_turn:
            runs = dealt_pairs(attempt.cut.part.run, tuple(map(len, runs)))
        work.runs = runs
        work.queue = ShardQueue(
            runs,
            self.pace,
            attempt.clock.shards,
            new,
            may_steal=not work.is_observed,
            in_turn=in_turn and not work.is_observed,
        )

    def take_opening(self, attempt: Attempt) -> None:
        """Take the model's buffers as the step's opening values."""
        self.replicas.open_step()

    def compute(
        self, attempt: Attempt, lane: int, batches: Mapping[int, Batch] | None = None
    ) -> None:
        """Compute shards of an attempt in the calling lane until none is left for it.

        Args:
            attempt: an open attempt.
            lane: the calling lane.
            batches: shards that were copied to devices already; others are copied here.
        """
        replica, queue, shard = self.replicas.of_lane(lane), attempt.work.queue, -1
        assert queue is not None
        outside = shard_here.set("apart" if attempt.cut.filled > 1 else None)
        try:
            while (shard := queue.next(lane)) is not None:  # type: ignore[assignment]
                may_join = attempt.work.compute_together is not None and batches is None
                if may_join and self._compute_together(attempt, replica, lane, shard):
                    continue
                work = self._work(replica, lane, attempt, shard, batches)
                attempt.work.results[shard] = attempt.work.compute(replica, work)
                if attempt.cut.shared:
                    attempt.cut.refuse_written_copies()
        except BaseException as error:
            attempt.drop()
            failure = failure_behind(error, replica.device)
            explain(failure, attempt, shard, replica, replica.device)
            if failure is error:
                raise
            raise failure from error
        finally:
            shard_here.reset(outside)

    def _compute_together(self, attempt: Attempt, replica: Replica, lane: int, first: int) -> bool:
        """Compute shards from `first` on at once, if there are such; return whether there are."""
        work, cut = attempt.work, attempt.cut
        assert self.together is not None
        assert work.queue is not None
        assert work.compute_together is not None
        runs = self.together.runs(replica, cut).get(first, ())
        shards = next((run for run in runs if work.queue.also(lane, run)), None)
        if shards is None:
            return False
        no_examples: dict[int, Batch] = dict.fromkeys(shards, ())
        works = [self._work(replica, lane, attempt, shard, no_examples) for shard in shards]
        take = functools.partial(cut.take, place=self._place[lane])
        leaves = work.compute_together(replica, works, cut, take)
        work.results.update(zip(shards, leaves, strict=True))
        return True

    def _finish_kernels(self, fences: Sequence[Any]) -> None:
        """Wait for kernels of the calling lane, unless its device is given up meanwhile."""
        lane = self.engine.lane_here
        if not streams.finish(fences, lambda: lane in self.engine.lost_lanes):
            raise self.engine.lost_error(lane)

    def copy(self, attempt: Attempt, shards: Sequence[int], device: Device) -> dict[int, Batch]:
        """Copy some shards' examples to `device`; called in its copy lane."""
        place, copied = self.experiment.placement(device), {}
        for shard in shards:
            if not attempt.ending.dropped:
                copied[shard] = attempt.cut.take(shard, place)
        if device.is_accelerator:  # until then, what the caller writes may be what is copied
            ends_s = time.perf_counter() + self.lost.after_s
            self._finish_copies(attempt, device, ends_s)
        attempt.cut.check_unchanged()
        attempt.clock.data_are_ready()
        return copied

    def _finish_copies(self, attempt: Attempt, device: Device, ends_s: float) -> None:
        """Wait for the copies of the calling lane, but no longer than for a device that hangs."""

        def is_late() -> bool:
            return attempt.ending.dropped or time.perf_counter() > ends_s

        streams.finish([streams.fence_here(device)], is_late)

    @property
    def check_limit_s(self) -> float:
        """The seconds that a check of some shards may take on one device, if there are others."""
        if len(self.lost.alive) < 2:
            return math.inf
        return _SHARDS_OF_A_CHECK * self.pace.limit_s(self.lost.after_s)

    def goes_on_after(self, error: Exception, when: str) -> bool:
        """Return whether the other devices go on after an error outside of a step's shards.

        Args:
            error: the error; of a device, or another one.
            when: what was being computed.
        """
        return is_device_failure(error) and self.lost.can_go_on(error, when)

    def lose_stuck(self, attempt: Attempt) -> set[int]:
        """Give up the devices that stand still in an attempt; return their lanes."""
        stuck = self._stuck_lanes(attempt, self.lost.alive, self.lost.after_s)
        for lane in stuck:
            self.lost.give_up(lane)
        return set(stuck)

    def _stuck_lanes(self, attempt: Attempt, alive: set[int], after_s: float) -> list[int]:
        """Return the lanes that take too long for a shard while another lane has none."""
        return attempt.work.queue.stuck(alive, after_s) if attempt.work.queue is not None else []

    def explain_loss(self, error: BaseException) -> None:
        """Note on the error of a step what was lost with a device."""

    def shards_per_s(self) -> float:
        """Return the shards a second of all devices together; 0 until all were measured."""
        return self.pace.total_speed(self.engine.lost_lanes)

    # ---- evaluation

    def measure(
        self,
        cut: Cut,
        measure: Measure,
        metrics: Mapping[str, Metric],
        seed: Callable[[int], int],
        outputs: str,
    ) -> list[dict[str, Any]]:
        """Return each metric's (total, count) of all shards, in their order.

        Args:
            cut: the batch.
            measure: calls the metrics.
            metrics: by name.
            seed: returns the seed of a shard's random numbers.
            outputs: the metric that returns tensors instead, if there is one of this name.
        """
        compute = functools.partial(measure_shard, measure=measure, metrics=metrics)
        own = self._evaluate(cut, compute, seed)
        return interruptible(self.group.measured_of_all, own, [*metrics], outputs)

    def predict(self, cut: Cut, forward: Forward, seed: Callable[[int], int]) -> list[Batch]:
        """Return the outputs of all shards, in their order."""
        compute = functools.partial(predict_shard, forward=forward)
        return interruptible(self.group.outputs_of_all, self._evaluate(cut, compute, seed))

    def _evaluate(
        self, cut: Cut, compute: Callable[[Replica, ShardWork], T], seed: Callable[[int], int]
    ) -> list[T]:
        """Return what `compute` gives for each of this process's shards, in their order."""
        self.replicas.open_step()
        try:
            self._check_evaluation(cut, compute, seed)
            while True:
                attempt = Attempt(0, cut, seed)
                attempt.work.compute = compute
                if self.engine.lost_lanes:
                    self.lost.go_on_without_idle("an evaluation")
                self._assign_evaluation(attempt)
                error = self._run_everywhere(attempt)
                if error is None:
                    streams.keep(attempt.work.results)
                    self._timekeeper.evaluated(attempt.clock)
                    return [attempt.work.results[shard] for shard in cut.part.run]
                if not self.lost.can_go_on(error, "an evaluation"):
                    self.explain_loss(error)
                    raise error
                self.replicas.restore_opening()
        finally:
            self.replicas.restore_opening()
            self._timekeeper.rest()

    def _check_evaluation(
        self, cut: Cut, compute: Callable[[Replica, ShardWork], T], seed: Callable[[int], int]
    ) -> None:
        """Refuse shards that would read what hooks have kept of each other.

        Checked is the first batch of each function, where layers have hooks and there are copies.
        """
        lanes, shards = sorted(self.lost.alive)[:2], cut.part.run[:2]
        kind = _definition_of(compute)
        if kind in self._checked_evaluations or self.side_by_side or len(shards) < 2:
            return
        if any(self.engine.devices[lane].is_accelerator for lane in lanes):
            return
        if not any(map(has_forward_hooks, self.replicas.home.module.modules())):
            return
        replicas = [self.replicas.of_lane(lane) for lane in lanes]
        if len({*map(id, replicas)}) < 2:
            return
        self._checked_evaluations.add(kind)
        attempt = Attempt(0, cut, seed)
        first, second = (
            functools.partial(compute, replica, self._work(replica, lane, attempt, shard, None))
            for replica, lane, shard in zip(replicas, lanes, shards, strict=True)
        )
        given = replicas[0].module, first, second
        name = "check the evaluation"
        task = self.engine.run_and_wait(refuse_shared_outputs, *given, name=name, category="check")
        if isinstance(task.error, ContractError):
            raise task.error

    def _assign_evaluation(self, attempt: Attempt) -> None:
        pace = self._evaluation_pace
        speeds = pace.speeds(self.engine.lost_lanes)
        if not any(speeds):
            raise self.engine.lost_error(0, "no device is left, so open a new trainer")
        runs = contiguous_runs(attempt.cut.part.run, speeds)
        attempt.work.queue = ShardQueue(runs, pace, attempt.clock.shards)

    def _run_everywhere(self, attempt: Attempt) -> BaseException | None:
        """Compute an attempt on all devices, and wait; return an error: first, of a device."""
        engine = self.engine
        tasks = {
            lane: Task(
                self._evaluate_shards,
                (attempt, lane),
                lane=lane,
                name="shards",
                category="shards",
                modes=PLAIN,
                quiet=True,
            )
            for lane in sorted(self.lost.alive)
        }
        try:
            engine.submit_tasks([*tasks.values()])
            for task in tasks.values():
                while not engine.wait_for(task, timeout_s=_LOOK_EVERY_S):
                    lost = self.lose_stuck(attempt)
                    attempt.ending.errors |= {lane: engine.lost_error(lane) for lane in lost}
                    if lost or engine.dead_lanes:  # others may wait for their shards
                        attempt.drop()
        except BaseException as error:  # Ctrl-C, or of kernels that were launched without one
            attempt.drop()
            for task in tasks.values():
                if task.was_submitted:
                    engine.drain(task)
            if not is_device_failure(error):
                raise
            engine.lose_failed(error, None)
            return error
        failed = {lane: task.error for lane, task in tasks.items() if task.error is not None}
        attempt.ending.errors = failed | attempt.ending.errors
        self.lost.give_up_failed(attempt.ending.errors)
        errors = sorted(attempt.ending.errors.values(), key=is_device_failure, reverse=True)
        return errors[0] if errors else None

    def _evaluate_shards(self, attempt: Attempt, lane: int) -> None:
        self.compute(attempt, lane)

    # ---- one shard

    def _work(
        self,
        replica: Replica,
        lane: int,
        attempt: Attempt,
        shard: int,
        batches: Mapping[int, Batch] | None,
    ) -> ShardWork:
        cut = attempt.cut
        batch = None if batches is None else batches.get(shard)
        if batch is None:
            batch = cut.take(shard, self._place[lane])
            if batches is not None:  # the user may have changed the examples meanwhile
                if replica.device.is_accelerator:
                    self._finish_kernels([streams.fence_here(replica.device)])
                cut.check_unchanged()
        elif not cut.lies_on(batch, replica.device):  # copied for another device's run
            batch = streams.copy_to(batch, replica.device)
        lo, hi = cut.bounds[shard]
        return ShardWork(
            shard,
            batch,
            None if cut.filled == 1 else hi - lo,
            cut.divisor,
            functools.partial(attempt.seed, shard),
            self._autocast_dtype,
            attempt.work.programs.get(hi - lo) if attempt.work.programs else None,
        )

    def _add(self, clock: StepClock, left: PartialSum, right: PartialSum) -> PartialSum:
        """Add two children of a node, and note the time that it takes."""
        lo, hi, began_s = left.lo, right.hi, time.perf_counter()
        node = add(left, right)
        clock.nodes.append(NodeTime(self.engine.lanes.here, lo, hi, began_s, time.perf_counter()))
        return node


def _definition_of(compute: Any) -> Any:
    """Return what two evaluations by the same functions have in common."""
    functions: list[Any] = []
    for one in compute.keywords.values():
        functions += one.values() if isinstance(one, Mapping) else [one]
    return compute.func, *(getattr(one, "__code__", type(one)) for one in functions)


def explain(
    error: BaseException, attempt: Attempt, shard: int | None, replica: Replica, device: Device
) -> None:
    """Note what may have caused an error inside a shard, and which examples the shard has."""
    if shard is None or shard < 0:
        return
    advice = advice_on(error, attempt.cut, shard, replica.module)
    if advice is not None:
        add_note(error, advice)
    place = attempt.place_of(shard)
    add_note(error, f"in {place} of step {attempt.number} on {device}")
