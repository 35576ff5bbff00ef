"""Refuses, before anything is trained, shards of one example that are too few for BatchNorm.

One image gives BatchNorm2d a value a channel for each of its pixels, which is enough, and one row
gives BatchNorm1d a single value. Which of the two it is shows when the model computes one example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from evenstep.batch import Batch, shard_bounds
from evenstep.batch.advice import is_too_few_values
from evenstep.batch.cut import Cut, tensors_of
from evenstep.batch.rng import ShardRandomness
from evenstep.contract.module_state import kept
from evenstep.engine import Engine
from evenstep.errors import BatchError, counted
from evenstep.options.experiment import Experiment, autocast
from evenstep.private_torch.modules import BatchNorm
from evenstep.replicas import Replicas
from evenstep.shard.lockstep import shard_here
from evenstep.shard.loss import ShardObjective


class LoneExamples:
    """Finds out whether a shard of one example is enough for the model's BatchNorm layers.

    Attributes:
        last_examples: the number of examples in the last batch of the epoch; None if it is unknown,
            or enough for BatchNorm.
        looked_at_below: the number of examples from which on a batch need not be judged.
    """

    def __init__(self, experiment: Experiment, replicas: Replicas, engine: Engine) -> None:
        self._experiment = experiment
        self._replicas = replicas
        self._engine = engine
        self._structure: object = None
        self._norms: Sequence[nn.Module] = ()
        self._known = set[object]()  # shapes of examples that are enough
        self._fewest = 2 * experiment.shards if experiment.batch_norm == "shard" else 0
        self.last_examples: int | None = None
        self.looked_at_below: float = self._fewest

    def expect(self, last_examples: int | None) -> None:
        """Note the number of examples in the last batch of the epoch that begins."""
        is_short = last_examples is not None and last_examples < self._fewest
        self.last_examples = last_examples if is_short else None
        self.looked_at_below = math.inf if is_short else self._fewest

    def are_unjudged(self, cut: Cut) -> bool:
        """Whether a batch, or the epoch's last one, has lone examples that must be looked at."""
        if cut.part.examples >= self._fewest and self.last_examples is None:
            return False
        if self._structure is not self._replicas.structure:
            self._structure, self._known = self._replicas.structure, set()
            modules = self._replicas.home.module.modules()
            self._norms = [one for one in modules if isinstance(one, BatchNorm)]
        if not any(one.training for one in self._norms):
            return False
        return cut.can_join and bool(cut.part.run) and _shapes(cut) not in self._known

    def refuse_too_few(
        self, cut: Cut, seed: Callable[[int], int], objective: ShardObjective
    ) -> None:
        """Refuse lone examples that give BatchNorm one value a channel; no step may be in flight.

        Raises:
            BatchError: there are some in the batch, or in the epoch's last batch.
        """
        error = self._engine.run_and_wait(
            self._compute, cut, seed, objective, name="compute one example", category="check"
        ).error
        if error is None or not is_too_few_values(error):
            self._known.add(_shapes(cut))  # any other error is left to the step
            self.expect(None)
            return
        for examples in (cut.part.examples, self.last_examples):
            if examples is not None and examples < self._fewest:
                raise _too_few(examples, self._experiment.shards)

    def _compute(self, cut: Cut, seed: Callable[[int], int], objective: ShardObjective) -> None:
        self._replicas.open_step()
        replica = self._replicas.of_lane(self._engine.lane_here)
        if replica.buffers:
            replica.open_shard()
        batch: Batch = cut.first_example(self._experiment.placement(replica.device))
        outside = shard_here.set("apart")
        try:
            with (
                kept(replica),
                ShardRandomness(lambda: seed(cut.part.run[0])),
                autocast(replica.device.kind, self._experiment.autocast_dtype),
            ):
                objective(replica.module, batch, 1)
        finally:
            shard_here.reset(outside)


def _shapes(cut: Cut) -> object:
    """Return what tells one example from another."""
    return tuple(leaf.shape for leaf in tensors_of(cut.first_example(lambda tensor: tensor)))


def _too_few(examples: int, shards: int) -> BatchError:
    bounds = shard_bounds(examples, shards)
    lone = next(shard for shard, (lo, hi) in enumerate(bounds) if hi - lo == 1)
    most = examples // 2
    remedy = f"use at most {counted(most, 'shard')}, or drop the last batch"
    return BatchError(
        f"batch of {counted(examples, 'example')} over {counted(shards, 'shard')} leaves shard "
        f"{lone} with 1 example, too few for BatchNorm: {remedy if most else 'drop the last batch'}"
    )
