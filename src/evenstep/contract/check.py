"""Checks on a few shards of a batch that the model and the objective keep the contract of a step.

A check has no effect on a result: everything that it changes is put back. It costs four forward
passes of a shard and two backward passes more than no check.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from evenstep.batch import Batch
from evenstep.contract.leaves import refuse_strange_leaves
from evenstep.contract.module_state import kept
from evenstep.contract.repeat import compute_twice
from evenstep.contract.separable import judge_separability
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import ShardObjective


@dataclasses.dataclass(frozen=True)
class ContractReport:
    """What a check has found out.

    Attributes:
        seconds: what the check took.
        unjudged: why it could not be judged whether the objective adds up over shards; empty if it
            does.
    """

    seconds: float
    unjudged: str = ""


def check_contract(
    replica: Replica,
    work: ShardWork,
    pair: Sequence[tuple[Batch, int]],
    objective: ShardObjective,
    *,
    separable: bool,
) -> ContractReport:
    """Check the code of a training on one replica; called in its device's lane.

    Args:
        replica: computes the shards; its parameters and buffers are left as they are.
        work: a shard of the batch.
        pair: the examples of two neighbouring shards together, of the first, and of the second,
            each with their number; empty if there are no two.
        objective: computes a shard's loss as (total, count).
        separable: whether to refuse an objective that doesn't add up over the shards.

    Raises:
        ContractError: the contract is broken; the message names what breaks it.
    """
    began_s = time.perf_counter()
    with kept(replica):
        first, second = compute_twice(replica, work, objective)
        refuse_strange_leaves(first.leaves, second.leaves, objective)
    unjudged = "this process has only one shard of the batch"
    if pair and separable:
        with kept(replica):
            unjudged = judge_separability(replica, work, pair, objective)
    elif not separable:
        unjudged = "separable=False was given"
    return ContractReport(time.perf_counter() - began_s, unjudged)
