"""A minibatch on its way through the devices: cut, computed shard by shard, summed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.collectives import TreeSum, tree_plan, tree_sum
from evenstep.compute import Leaf, NodeSum, ShardWork, add_nodes, compute_shard
from evenstep.devices import carry
from evenstep.draws import DrawWatch
from evenstep.engine.forkjoin import Lanes, Task
from evenstep.errors import BatchError
from evenstep.evaluation import Measure, Metric, measure_shard
from evenstep.experiment import Experiment
from evenstep.objective import ShardObjective
from evenstep.replicas import Replica, Replicas
from evenstep.sharding import Batch, Cut, contiguous_runs, cut_batch

T = TypeVar("T")
SeedOf: TypeAlias = Callable[[int], int]
"""The seed of the random ops of a shard, by its number."""


class ShardRunner:
    """Runs a function over the shards of minibatches, each on the replica of some device.

    Attributes:
        watch: what is known of the model's random ops.
    """

    def __init__(self, experiment: Experiment, replicas: Replicas) -> None:
        self.experiment = experiment
        self.replicas = replicas
        self.watch = DrawWatch([replica.device.torch_device for replica in replicas.all])

    def split(self, batch: Batch) -> Cut:
        """Cut `batch` into the experiment's shards."""
        return cut_batch(batch, self.experiment.shards)

    def train(
        self,
        lanes: Lanes,
        cut: Cut,
        objective: ShardObjective,
        seed_of: SeedOf,
        observe: Callable[[int, NodeSum], None] | None = None,
    ) -> tuple[list[Leaf | None], NodeSum]:
        """Compute every shard forward and backward; return the leaves' losses and the sum."""
        refuse_lonely_batch_norm(self.replicas.home.module, cut.bounds)

        def attempt() -> tuple[list[Leaf | None], NodeSum]:
            tree = TreeSum(tree_plan(len(cut.bounds), cut.filled), add_nodes)
            compute = functools.partial(
                compute_shard, objective=self.watch.watched(objective), tree=tree, observe=observe
            )
            return self._run(lanes, cut, compute, seed_of), tree.take_root()

        result = self.watch.repeat(attempt)
        self.watch.step_done()
        return result

    def measure(
        self,
        lanes: Lanes,
        cut: Cut,
        measure: Measure,
        metrics: Mapping[str, Metric],
        seed_of: SeedOf,
    ) -> dict[str, tuple[float, float]]:
        """Return each metric's total and count over the shards, summed in the canonical tree."""
        compute = functools.partial(measure_shard, measure=measure, metrics=metrics)
        shards = self.watch.repeat(lambda: self._run(lanes, cut, compute, seed_of))
        return {
            name: (
                sum_floats([None if shard is None else shard[name][0] for shard in shards]),
                sum_floats([None if shard is None else shard[name][1] for shard in shards]),
            )
            for name in metrics
        }

    def _run(
        self, lanes: Lanes, cut: Cut, function: Callable[[Replica, ShardWork], T], seed_of: SeedOf
    ) -> list[T | None]:
        def run(replica: Replica, shard: int) -> T:
            return function(replica, self._load(replica, cut, shard, seed_of))

        replicas = self.replicas.all
        tasks = [
            Task(lane, run, (replicas[lane], shard))
            for lane, shards in enumerate(contiguous_runs(range(cut.filled), len(replicas)))
            for shard in shards
        ]
        results: list[T | None] = [None] * len(cut.bounds)
        results[: cut.filled] = lanes.run(tasks)
        return results

    def _load(self, replica: Replica, cut: Cut, shard: int, seed_of: SeedOf) -> ShardWork:
        """Bring one shard's examples to its device: straight from the user's tensors."""

        def place(examples: torch.Tensor) -> torch.Tensor:
            return carry(examples, replica.device, self.experiment.image_format(examples))

        lo, hi = cut.bounds[shard]
        alone = cut.filled == 1
        return ShardWork(
            shard=shard,
            batch=cut.take(shard, place),
            weight=1 if alone else hi - lo,
            alone=alone,
            random_seed=seed_of(shard) if self.watch.draws else None,
            watch_backward=self.watch.watch_backward,
            precision=self.experiment.autocast_dtype,
        )


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
