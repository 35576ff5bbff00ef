"""A minibatch on its way through the devices: cut, computed shard by shard, summed."""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.batch import Batch, Cut, contiguous_runs, cut_batch
from evenstep.collectives import TreeSum, tree_sum
from evenstep.devices import Device, carry
from evenstep.engine import Engine, Runs, Task, Var, streams
from evenstep.engine.task import PLAIN
from evenstep.errors import BatchError, DeviceLostError, add_note
from evenstep.experiment import Experiment
from evenstep.replicas import Replica, Replicas
from evenstep.shard.compile_policy import ShardPrograms
from evenstep.shard.evaluation import Forward, Measure, Metric, measure_shard, predict_shard
from evenstep.shard.forward_backward import NodeSum, ShardWork, add_nodes, compute_shard
from evenstep.shard.gradients import GradientStream
from evenstep.shard.lockstep import Lockstep, ShardInStep, Turn
from evenstep.shard.loss import ShardObjective
from evenstep.shard.random_ops import DrawWatch
from evenstep.shard.sync_batch_norm import SyncedBatchNorm
from evenstep.training.clock import StepClock, Timekeeper
from evenstep.training.group import Team
from evenstep.training.step import Attempt, SeedOf

T = TypeVar("T")


class ShardRunner:
    """Makes the tasks that compute the shards of minibatches, each on the replica of its lane.

    Attributes:
        watch: what is known of the model's random ops.
        engine: where the tasks run.
        team: the processes that compute a batch together.
        adds_once: whether a backward pass adds to each gradient once, as far as was seen.
        programs: finds the compiled shards; None without `hybridize`.
    """

    def __init__(
        self,
        experiment: Experiment,
        replicas: Replicas,
        engine: Engine,
        timekeeper: Timekeeper,
        team: Team,
    ) -> None:
        self.experiment = experiment
        self.replicas = replicas
        self.engine = engine
        self._timekeeper = timekeeper
        self.watch = DrawWatch([device.torch_device for device in engine.devices])
        self.team = team
        self.adds_once = True
        self.programs = ShardPrograms(experiment, replicas) if experiment.hybridize else None

    def split(self, batch: Batch, step: int) -> Cut:
        """Cut `batch` of step `step` (or this process's part of it) into shards."""
        return cut_batch(batch, self.experiment.shards, self.team.part_of_batch(batch, step))

    def shards_per_s(self) -> float:
        """Return how many shards a second the devices compute together; 0 while it isn't known."""
        return self.engine.pace.total_speed("compute", self.engine.lost_lanes)

    def copy_tasks(self, attempt: Attempt) -> list[Task]:
        """Return tasks that bring shards' examples to the devices whose runs they begin in."""
        engine = self.engine
        return [
            Task(
                self._copy,
                (attempt, shards, engine.devices[lane]),
                lane=engine.copy_lane(lane),
                name=f"copy {_spelled(shards)}",
                category="copy",
                story={"step": attempt.number},
                quiet=True,
            )
            for lane, shards in enumerate(self._deal(attempt.cut.part.run, "compute"))
            if shards
        ]

    def train_tasks(
        self,
        attempt: Attempt,
        objective: ShardObjective,
        seed_of: SeedOf,
        observe: Callable[[int, NodeSum], None] | None,
        copies: Sequence[Task] = (),
        reads: Sequence[Var] = (),
    ) -> list[Task]:
        """Return a task for each lane: they compute the shards and sum them in the attempt's tree.

        The result of each is a dict from shards to their losses.

        Args:
            attempt: the batch, and what becomes of it.
            objective: of a shard.
            seed_of: seeds of the shards' random ops.
            observe: called with each shard's own value.
            copies: the tasks that bring the shards' examples; none: the shards fetch them.
            reads: what the shards read besides.
        """
        if self.programs is not None:
            told = self.programs.told
            attempt.programs = self.programs.of(attempt.cut, objective)
            if self.programs.told is not told:  # it took time that is no step's
                self._timekeeper.rest()
        add = functools.partial(self._add_nodes, attempt.clock)
        attempt.tree = TreeSum(attempt.trees.plans[attempt.cut.part.rank], add)
        compute = functools.partial(
            compute_shard,
            objective=self.watch.watched(objective),
            tree=attempt.tree,
            stream=self._stream(attempt, observed=observe is not None),
            may_accumulate=self.adds_once,
            observe=observe,
        )
        return self._tasks(attempt, compute, seed_of, "compute", copies, reads)

    def _stream(self, attempt: Attempt, *, observed: bool) -> GradientStream | None:
        """Let gradients leave as they become final, where there is anything to gain by that."""
        if self.team.exchange is None:
            return None
        attempt.sending = self.team.exchange.begin(attempt.trees, attempt.number)
        eager = not attempt.programs  # a compiled shard has all its gradients at its end
        may_stream = eager and self.adds_once and self.replicas.on_cpus and not observed
        if not may_stream or len(attempt.sending.buckets) < 2:
            return None
        return GradientStream(attempt.trees.plans[attempt.cut.part.rank], attempt.sending)

    def measure(
        self, cut: Cut, measure: Measure, metrics: Mapping[str, Metric], seed_of: SeedOf
    ) -> dict[str, tuple[float, float]]:
        """Return each metric's total and count over the shards, summed in the canonical tree."""
        compute = functools.partial(measure_shard, measure=measure, metrics=metrics)
        found = self._evaluate(cut, compute, seed_of)
        if self.team.exchange is not None:
            found = self.team.exchange.pairs_of_all(cut.part.run, found, metrics)
        shards = [found[shard] for shard in range(cut.filled)]
        return {
            name: (
                sum_floats([shard[name][0] for shard in shards]),
                sum_floats([shard[name][1] for shard in shards]),
            )
            for name in metrics
        }

    def predict(self, cut: Cut, forward: Forward, seed_of: SeedOf) -> list[Batch]:
        """Return the outputs of all shards, in their order."""
        compute = functools.partial(predict_shard, forward=forward)
        found = self._evaluate(cut, compute, seed_of)
        own = [found[shard] for shard in cut.part.run]
        return self.team.exchange.outputs_of_all(own) if self.team.exchange is not None else own

    def _evaluate(
        self, cut: Cut, compute: Callable[[Replica, ShardWork], T], seed_of: SeedOf
    ) -> dict[int, T]:
        """Return what `compute` gives for each of this process's shards."""

        def attempt() -> dict[int, T]:
            go = Attempt(cut)
            shards = self._run_all(go, self._tasks(go, compute, seed_of, "evaluate"))
            self._timekeeper.noted(0, go.clock, "evaluate")
            return shards

        self.replicas.open_step()
        try:
            return self.watch.repeat(attempt)
        finally:
            self.replicas.restore_opening()
            self._timekeeper.rest()

    def _run_all(self, attempt: Attempt, tasks: Sequence[Task]) -> dict[int, Any]:
        """Run `tasks` to their end; return what each shard gave, or raise the first error."""
        engine = self.engine
        engine.submit_tasks(tasks)
        try:
            for task in tasks:
                engine.wait_for(task)
        except BaseException:  # Ctrl-C
            attempt.drop()
            for task in tasks:
                engine.drain(task)
            raise
        for task in tasks:
            if task.error is not None:
                raise task.error
        return {shard: value for task in tasks for shard, value in task.result.items()}

    def _tasks(
        self,
        attempt: Attempt,
        function: Callable[[Replica, ShardWork], Any],
        seed_of: SeedOf,
        category: str,
        copies: Sequence[Task] = (),
        reads: Sequence[Var] = (),
    ) -> list[Task]:
        """Return a task for each lane that is not lost, and deal the shards to their runs."""
        deal = self._deal(attempt.cut.part.run, category)
        if category == "compute" and self._goes_in_lockstep(attempt.cut):
            self._refuse_lost_devices()
            attempt.lockstep = Lockstep(attempt.cut.filled)
            work_off = functools.partial(self._work_off_abreast, attempt, function, seed_of, deal)
        else:
            attempt.runs = self._runs_of(deal, category)
            work_off = functools.partial(self._work_off, attempt, function, seed_of, category)
        engine = self.engine
        carried = [engine.handle(task) for task in copies]
        return [
            Task(
                work_off,
                (carried,),
                lane=lane,
                name="shards",
                category="shards",
                reads=reads,
                modes=PLAIN,
                story={"step": attempt.number},
                quiet=True,
            )
            for lane in range(len(engine.devices))
            if lane not in engine.scheduler.lost
        ]

    def _goes_in_lockstep(self, cut: Cut) -> bool:
        """Whether all shards are to be under way at once; one shard alone is the whole batch."""
        return self.experiment.batch_norm == "sync" and cut.filled > 1

    def _refuse_lost_devices(self) -> None:
        """Refuse to go in lockstep with a device that will bring nothing."""
        lost = ", ".join(str(self.engine.devices[lane]) for lane in sorted(self.engine.lost_lanes))
        if lost:
            raise DeviceLostError(
                f"{lost} was lost, and with batch_norm='sync' the others would wait for it: save, "
                f"and go on with Trainer.load on other devices"
            )

    def _runs_of(self, deal: Sequence[Sequence[int]], category: str) -> Runs[int]:
        runs = Runs[int](len(deal), self.engine.pace, lambda shard: category)
        for lane, shards in enumerate(deal):
            for shard in shards:
                runs.add(lane, shard)
            if category == "compute" and not self.replicas.all[lane].has_learned:
                # Whether the model is refused on this replica must not depend on timing.
                runs.leave_first(lane)
        return runs

    def _work_off(
        self,
        attempt: Attempt,
        function: Callable[[Replica, ShardWork], T],
        seed_of: SeedOf,
        category: str,
        carried: Sequence[dict[int, Batch]],
    ) -> dict[int, T]:
        """Compute the shards of the calling lane's run, and what it can steal; in that lane."""
        lane = self.engine.lane_here
        replica = self.replicas.all[lane]
        batches = {shard: batch for run in carried for shard, batch in run.items()}
        results: dict[int, T] = {}
        try:
            while (shard := attempt.next_shard(lane)) is not None:
                work = self._work(replica, attempt, shard, batches.pop(shard, None), seed_of)
                results[shard] = function(replica, work)
        except BaseException as error:
            attempt.dropped = True
            add_note(error, f"in shard {shard} of step {attempt.number} on {replica.device}")
            raise
        return results

    def _work_off_abreast(
        self,
        attempt: Attempt,
        function: Callable[[Replica, ShardWork], T],
        seed_of: SeedOf,
        deal: Sequence[Sequence[int]],
        carried: Sequence[dict[int, Batch]],
    ) -> dict[int, T | None]:
        """Compute the shards of the calling lane's run, all under way at once (`lockstep.py`)."""
        lane, lockstep = self.engine.lane_here, attempt.lockstep
        assert lockstep is not None
        batches = {shard: batch for run in carried for shard, batch in run.items()}
        device_is_free = threading.Lock()

        def note(turn: Turn) -> None:
            shard, began_s, ended_s = turn
            attempt.clock.shards.append((lane, shard, False, began_s, ended_s))

        def compute(place: int, shard: int) -> T | None:
            replica = self.replicas.abreast(lane, place)
            in_step = ShardInStep(lockstep, shard, device_is_free, note)

            def in_turn() -> T:
                work = self._work(replica, attempt, shard, batches.pop(shard, None), seed_of)
                with SyncedBatchNorm(in_step):
                    return function(replica, work)

            try:
                return in_step.run(in_turn)
            except BaseException as error:
                attempt.drop()
                add_note(error, f"in shard {shard} of step {attempt.number} on {replica.device}")
                raise

        shards = deal[lane]
        with ThreadPoolExecutor(max(1, len(shards)), "shard", self.engine.adopt, (lane,)) as crew:
            found = [crew.submit(compute, place, shard) for place, shard in enumerate(shards)]
        return {shard: future.result() for shard, future in zip(shards, found, strict=True)}

    def _deal(self, shards: Sequence[int], category: str) -> list[list[int]]:
        """Give every device a contiguous run of shards, as long as its measured speed deserves.

        Where shards wait for each other, all devices get as many.
        """
        if self.experiment.batch_norm == "sync":
            return contiguous_runs(shards, [1.0] * len(self.engine.devices))
        pace, lost = self.engine.pace, self.engine.lost_lanes
        runs = contiguous_runs(shards, pace.speeds(category, lost))
        pace.forget_idle(category, [lane for lane, run in enumerate(runs) if not run])
        return runs

    def _work(
        self, replica: Replica, attempt: Attempt, shard: int, batch: Batch | None, seed_of: SeedOf
    ) -> ShardWork:
        cut = attempt.cut
        lo, hi = cut.bounds[shard]
        alone = cut.filled == 1
        return ShardWork(
            shard=shard,
            batch=self._take(cut, shard, batch, replica.device),
            weight=1 if alone else hi - lo,
            alone=alone,
            random_seed=seed_of(shard) if self.watch.draws else None,
            watch_backward=self.watch.watch_backward,
            precision=self.experiment.autocast_dtype,
            program=attempt.programs.get(hi - lo),
        )

    def _take(self, cut: Cut, shard: int, batch: Batch | None, device: Device) -> Batch:
        """Bring one shard's examples to `device`; straight from the user's tensors, or on again.

        `batch` is what a copy lane has made of them; it may lie on another GPU, whose run the shard
        began in.
        """
        if batch is not None:
            return batch if cut.lies_on(batch, device) else streams.copy_to(batch, device)

        def place(examples: torch.Tensor) -> torch.Tensor:
            return carry(examples, device, self.experiment.image_format(examples))

        return cut.take(shard, place)

    def _copy(self, attempt: Attempt, shards: Sequence[int], device: Device) -> dict[int, Batch]:
        """Bring some shards to `device`; in its copy lane."""
        batches = {}
        for shard in shards:
            if not attempt.dropped:
                batches[shard] = self._take(attempt.cut, shard, None, device)
        attempt.cut.check_unchanged()
        attempt.clock.data_are_there()
        return batches

    def _add_nodes(self, clock: StepClock, left: NodeSum, right: NodeSum) -> NodeSum:
        began = time.perf_counter()
        node = add_nodes(left, right)
        lane = self.engine.lane_here
        clock.nodes.append((lane, left.lo, right.hi, began, time.perf_counter()))
        return node


def _spelled(shards: Sequence[int]) -> str:
    return f"shards [{shards[0]},{shards[-1] + 1})"


def sum_floats(values: Sequence[float | torch.Tensor | None]) -> float:
    """Sum numbers of shards (None for an empty one) in canonical order, in double precision."""
    total = tree_sum([None if value is None else float(value) for value in values], operator.add)
    assert total is not None
    return total


def refuse_lonely_batch_norm(model: nn.Module, bounds: Sequence[tuple[int, int]]) -> None:
    """Refuse a batch that leaves a training BatchNorm layer a shard of one example.

    Raises:
        BatchError: which shard, and how many shards would do.
    """
    lonely = [shard for shard, (lo, hi) in enumerate(bounds) if hi - lo == 1]
    if not lonely or len(bounds) == 1:
        return
    if any(isinstance(child, _BatchNorm) and child.training for child in model.modules()):
        examples = bounds[-1][1]
        most = examples // 2
        remedy = f"use at most {most} shard{'s' * (most > 1)}, or drop the last batch"
        raise BatchError(
            f"batch of {examples} examples over {len(bounds)} shards leaves shard {lonely[0]} with "
            f"1 example, too few for BatchNorm: {remedy if most else 'drop the last batch'}"
        )
