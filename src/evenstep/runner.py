"""A minibatch on its way through the devices: cut, computed shard by shard, summed."""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.collectives import TreeSum, tree_plan, tree_sum
from evenstep.compute import NodeSum, ShardWork, add_nodes, compute_shard
from evenstep.devices import Device, carry
from evenstep.draws import DrawWatch, States
from evenstep.engine import Engine, Task
from evenstep.errors import BatchError
from evenstep.evaluation import Measure, Metric, measure_shard
from evenstep.experiment import Experiment
from evenstep.objective import ShardObjective
from evenstep.replicas import Replica, Replicas
from evenstep.sharding import Batch, Cut, contiguous_runs, cut_batch
from evenstep.timing import NodeTime, StepClock

T = TypeVar("T")
SeedOf: TypeAlias = Callable[[int], int]
"""The seed of the random ops of a shard, by its number."""


@dataclasses.dataclass(eq=False)
class Attempt:
    """One go at a batch's shards; where it fails half-way it is thrown away whole.

    Attributes:
        cut: the batch.
        clock: its times.
        tree: the sum over its shards (of a training step).
        dropped: whether what has not begun of it shall not begin.
        before: the states of the default generators when it began; None where nobody looks.
    """

    cut: Cut
    clock: StepClock = dataclasses.field(default_factory=StepClock)
    tree: TreeSum[NodeSum] | None = None
    dropped: bool = False
    before: States | None = None


class ShardRunner:
    """Makes the tasks that compute the shards of minibatches, each on the replica of its lane.

    Attributes:
        watch: what is known of the model's random ops.
        engine: where the tasks run.
    """

    def __init__(self, experiment: Experiment, replicas: Replicas, engine: Engine) -> None:
        self.experiment = experiment
        self.replicas = replicas
        self.engine = engine
        self.watch = DrawWatch([device.torch_device for device in engine.devices])

    def split(self, batch: Batch) -> Cut:
        """Cut `batch` into the experiment's shards."""
        return cut_batch(batch, self.experiment.shards)

    def copy_tasks(self, attempt: Attempt, number: int) -> list[Task]:
        """Return tasks that bring each shard's examples to the device whose run it begins in."""
        return [
            Task(
                self._copy,
                (attempt, shard, self.engine.devices[lane]),
                lane=self.engine.copy_lane(lane),
                name=f"copy shard {shard}",
                category="copy",
                story={"step": number, "shard": shard},
                quiet=True,
            )
            for lane, shards in enumerate(self._deal(attempt.cut, "compute"))
            for shard in shards
        ]

    def train_tasks(
        self,
        attempt: Attempt,
        number: int,
        objective: ShardObjective,
        seed_of: SeedOf,
        observe: Callable[[int, NodeSum], None] | None,
        copies: Sequence[Task] = (),
    ) -> list[Task]:
        """Return tasks that compute the shards and sum them in the attempt's tree.

        Args:
            attempt: the batch, and what becomes of it.
            number: of the step.
            objective: of a shard.
            seed_of: seeds of the shards' random ops.
            observe: called with each shard's own value.
            copies: the tasks that bring each shard's examples; none: the shards fetch them.
        """
        cut = attempt.cut
        add = functools.partial(self._add_nodes, attempt.clock)
        attempt.tree = TreeSum(tree_plan(len(cut.bounds), cut.filled), add)
        compute = functools.partial(
            compute_shard,
            objective=self.watch.watched(objective),
            tree=attempt.tree,
            observe=observe,
        )
        return self._tasks(attempt, compute, seed_of, "compute", number, copies)

    def measure(
        self, cut: Cut, measure: Measure, metrics: Mapping[str, Metric], seed_of: SeedOf
    ) -> dict[str, tuple[float, float]]:
        """Return each metric's total and count over the shards, summed in the canonical tree."""
        compute = functools.partial(measure_shard, measure=measure, metrics=metrics)

        def attempt() -> list[Any]:
            go = Attempt(cut)
            tasks = self._tasks(go, compute, seed_of, "evaluate", 0)
            return self._run_all(go, tasks)

        shards = self.watch.repeat(attempt)
        return {
            name: (
                sum_floats([shard[name][0] for shard in shards]),
                sum_floats([shard[name][1] for shard in shards]),
            )
            for name in metrics
        }

    def _run_all(self, attempt: Attempt, tasks: Sequence[Task]) -> list[Any]:
        """Run `tasks` to their end; return their results, or raise the first one's error."""
        engine = self.engine
        engine.submit_tasks(tasks)
        try:
            for task in tasks:
                engine.wait_for(task)
                attempt.dropped = attempt.dropped or task.error is not None
        except BaseException:  # Ctrl-C
            attempt.dropped = True
            for task in tasks:
                engine.drain(task)
            raise
        for task in tasks:
            if task.error is not None:
                raise task.error
        return [task.result for task in tasks]

    def _tasks(
        self,
        attempt: Attempt,
        function: Callable[[Replica, ShardWork], T],
        seed_of: SeedOf,
        category: str,
        number: int,
        copies: Sequence[Task] = (),
    ) -> list[Task]:
        def run(shard: int, batch: Batch | None = None) -> T | None:
            if attempt.dropped:
                return None
            replica = self.replicas.all[self.engine.lane_here]
            return function(replica, self._work(replica, attempt.cut, shard, batch, seed_of))

        carried = {task.arguments[1]: (self.engine.handle(task),) for task in copies}
        return sorted(
            (
                Task(
                    run,
                    (shard, *carried.get(shard, ())),
                    run=lane,
                    name=f"shard {shard}",
                    category=category,
                    story={"step": number, "shard": shard},
                    quiet=True,
                )
                for lane, shards in enumerate(self._deal(attempt.cut, category))
                for shard in shards
            ),
            key=lambda task: task.arguments[0],
        )

    def _deal(self, cut: Cut, category: str) -> list[list[int]]:
        """Give every device a contiguous run of shards, as long as its measured speed deserves."""
        scheduler = self.engine.scheduler
        runs = contiguous_runs(range(cut.filled), scheduler.speeds(category))
        scheduler.forget_idle(category, [lane for lane, run in enumerate(runs) if not run])
        return runs

    def _work(
        self, replica: Replica, cut: Cut, shard: int, batch: Batch | None, seed_of: SeedOf
    ) -> ShardWork:
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
        )

    def _take(self, cut: Cut, shard: int, batch: Batch | None, device: Device) -> Batch:
        """Bring one shard's examples to `device`; straight from the user's tensors, or on again.

        `batch` is what a copy lane brought to the device whose run the shard began in; where that
        is on another GPU, or on none, it is carried on.
        """
        if batch is not None and cut.lies_on(batch, device):
            return batch

        def place(examples: torch.Tensor) -> torch.Tensor:
            return carry(examples, device, self.experiment.image_format(examples))

        return cut.take(shard, place)

    def _copy(self, attempt: Attempt, shard: int, device: Device) -> Batch:
        if attempt.dropped:
            return None
        batch = self._take(attempt.cut, shard, None, device)
        attempt.cut.check_unchanged()
        attempt.clock.data_are_there()
        return batch

    def _add_nodes(self, clock: StepClock, left: NodeSum, right: NodeSum) -> NodeSum:
        began = time.perf_counter()
        node = add_nodes(left, right)
        lane = self.engine.lane_here
        clock.nodes.append(NodeTime(lane, left.lo, right.hi, began, time.perf_counter()))
        return node


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
