"""A minibatch on its way through the devices: cut, computed shard by shard, summed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.collectives import TreeSum, tree_plan, tree_sum
from evenstep.compute import Leaf, NodeSum, ShardWork, add_nodes, compute_shard
from evenstep.engine import Lanes, Task
from evenstep.errors import BatchError
from evenstep.evaluation import Measure, Metric, measure_shard
from evenstep.experiment import Experiment
from evenstep.objective import Number, ShardObjective
from evenstep.replicas import Replica, Replicas, carry
from evenstep.rng import default_states, have_moved, restore_default_states
from evenstep.sharding import Batch, Cut, contiguous_runs, cut_batch

T = TypeVar("T")
SeedOf: TypeAlias = Callable[[int], int]
"""The seed of the random ops of a shard, by its number."""


class ShardRunner:
    """Runs a function over the shards of minibatches, each on the replica of some device.

    Attributes:
        draws_random: whether the model was seen to use random ops. Until then its shards run
            without the dispatch mode that gives them generators of their own, which costs time.
    """

    def __init__(self, experiment: Experiment, replicas: Replicas) -> None:
        self.experiment = experiment
        self.replicas = replicas
        self.draws_random = False
        self._backward_seen = False
        self._seen_drawing = False
        self._is_first = True
        self._torch_devices = sorted(
            {replica.device.torch_device for replica in replicas.all} | {torch.device("cpu")},
            key=str,
        )

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
                compute_shard, objective=self._watched(objective), tree=tree, observe=observe
            )
            return self._run(lanes, cut, compute, seed_of), tree.take_root()

        result = self._repeatable(attempt)
        self._backward_seen = self.draws_random
        self._is_first = False
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
        shards = self._repeatable(lambda: self._run(lanes, cut, compute, seed_of))
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
            random_seed=seed_of(shard) if self.draws_random else None,
            watch_backward=not self._backward_seen,
            precision=self.experiment.autocast_dtype,
        )

    def _watched(self, objective: ShardObjective) -> ShardObjective:
        """In the first step, let `objective` look for draws after each forward pass too.

        The end of the attempt can be too late to see them: where activations are recomputed, every
        lane puts the default generator back to what it was when the lane began to. In later steps
        the end must do: looking costs 16 µs a shard.
        """
        if self.draws_random or not self._is_first:
            return objective
        before = default_states(self._torch_devices)

        def watched(model: nn.Module, batch: Batch, alone: bool) -> tuple[torch.Tensor, Number]:
            result = objective(model, batch, alone)
            if have_moved(self._torch_devices, before):
                self._seen_drawing = True
            return result

        return watched

    def _repeatable(self, attempt: Callable[[], T]) -> T:
        """Return `attempt()`, whose random ops must not have come from a default generator.

        If they did, it is done again with a generator for each shard, now and from here on.
        """
        if self.draws_random:
            return attempt()
        before = default_states(self._torch_devices)
        error: Exception | None = None
        try:
            result = attempt()
        except Exception as caught:
            error = caught
        if restore_default_states(self._torch_devices, before) or self._seen_drawing:
            self.draws_random = True
            return attempt()
        if error is not None:
            raise error
        return result


def sum_floats(values: Sequence[float | torch.Tensor | None]) -> float:
    """Sum numbers of shards (None for an empty one) in canonical order, in double precision."""
    total = tree_sum(
        [None if value is None else float(value) for value in values], lambda a, b: a + b
    )
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
