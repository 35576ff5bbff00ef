"""Measures how long each part of a network takes for a shard, to cut it into equal stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from evenstep.batch import Batch
from evenstep.collectives import TreeSum
from evenstep.collectives.tree import tree_plan
from evenstep.contract.module_state import kept
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import ShardWork, compute_shard
from evenstep.shard.loss import ShardLoss, ShardObjective
from evenstep.shard.partial_sum import add
from evenstep.stages.plan import StagePlan
from evenstep.stages.shard import StagedShard, hook_stages
from evenstep.stages.turns import Turns
from evenstep.stages.visits import Visit, Visits

_TIMES = 3  # the shard is computed so often; the shortest time counts


def measure_parts(
    replica: Replica, work: ShardWork, objective: ShardObjective, parts: StagePlan
) -> list[float]:
    """Return the seconds that a shard spends in each part of the network, forward and backward.

    The shard goes through the parts as it later goes through the stages, alone in the calling
    lane. The replica is left as it was.

    Args:
        replica: computes the shard; its opening values are set.
        work: the shard.
        objective: computes the shard's loss.
        parts: every part of the model, each as a stage.
    """
    shard: StagedShard | None = None

    def watched(model: nn.Module, batch: Batch, examples: int | None) -> ShardLoss:
        loss = objective(model, batch, examples)
        if shard is not None and loss[0].requires_grad:
            shard.forward_ends(loss[0])
        return loss

    rounds = []
    hooks = hook_stages(replica, parts, lambda: shard)
    try:
        for _ in range(_TIMES):
            visits: list[Visit] = []
            turns = Turns(parts.count)
            shard = StagedShard(
                work.shard, turns, Visits(visits.append), own_memory=False, returns=True
            )
            with kept(replica):
                shard.begin()
                compute_shard(
                    replica,
                    work,
                    objective=watched,
                    tree=TreeSum(tree_plan(1, 1), add),
                    may_accumulate=False,
                )
                shard.end()
            rounds.append(_seconds(visits, parts.count))
    finally:
        for hook in hooks:
            hook.remove()
    return [min(times) for times in zip(*rounds, strict=True)]


def _seconds(visits: Sequence[Visit], count: int) -> list[float]:
    seconds = [0.0] * count
    for visit in visits:
        seconds[visit.place.stage] += visit.ended_s - visit.began_s
    return seconds
