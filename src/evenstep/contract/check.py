"""Checks on a few shards of a batch that the model and the objective keep the contract of a step.

A check has no effect on a result: shards are computed on copies of the model, and everything else
that it changes is put back.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import torch

from evenstep.contract.adding_up.gradients import refuse_own_gradients
from evenstep.contract.adding_up.separable import Neighbours, judge_separability
from evenstep.contract.adding_up.sums import refuse_wrong_sum
from evenstep.contract.leaves import refuse_strange_leaves
from evenstep.contract.module_state import kept
from evenstep.contract.order import refuse_deciding_counts, refuse_history, refuse_passed_on
from evenstep.contract.overlap import refuse_shared_values
from evenstep.contract.rehearsal import Rehearsal
from evenstep.contract.repeat import ShardResult, compute_observed, compute_twice, unwritten
from evenstep.errors import EvenstepError, WrongSumError
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import Number, ShardObjective


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
    rehearsal: Rehearsal, neighbours: Neighbours, home: Replica, *, separable: bool
) -> ContractReport:
    """Check the code of a training; called in the lane of the first device.

    Unless `separable`, an objective that doesn't add up over the shards is accepted. `home` is the
    replica that is the user's module.

    Raises:
        ContractError: the contract is broken; the message names what breaks it.
        WrongSumError: gradients are added up wrongly.
    """
    began_s = time.perf_counter()
    replica, work, objective = rehearsal.replica, rehearsal.works[0], rehearsal.objective
    with kept(replica):
        copied = rehearsal.copy()
        first, leaves = compute_twice(
            copied or replica, work, objective, home=None if copied is None else home
        )
        refuse_strange_leaves(first.leaves, leaves, objective)
        if copied is not None and len(rehearsal.works) > 1:
            _check_beside_another(rehearsal, copied, first)
        if copied is not None and separable and not work.is_only_shard:
            refuse_own_gradients(copied, work, objective)
    del first
    unjudged = "separable=False was given"
    if separable:
        unjudged = check_sums(rehearsal, neighbours, copied, compares_gradients=True)
    return ContractReport(time.perf_counter() - began_s, unjudged)


def _check_beside_another(rehearsal: Rehearsal, copied: Replica, first: ShardResult) -> None:
    """Check two shards in both orders, and their sum; `first` was computed on `copied`."""
    replica, objective = rehearsal.replica, rehearsal.objective
    work, other = rehearsal.works
    later = rehearsal.fresh_copy(replica)
    other_first = _computed(later, other, objective)
    if other_first is not None:
        again = compute_observed(later, work, objective)
        refuse_history(replica, first, again)
        refuse_deciding_counts(
            later, first, again, functools.partial(_computed, later, work, objective)
        )
        del again  # at most three sets of gradients are there at any time
        if not copied.device.is_accelerator:  # whose threads have streams of their own
            beside = functools.partial(_computed, later, other, _loss_alone(objective))
            refuse_shared_values(copied, work, objective, first, beside)
        try:
            refuse_wrong_sum(copied, first, other_first, other, objective)
        except WrongSumError:  # or the second shard gives something else after the first one
            fresh = rehearsal.fresh_copy(replica)
            other_alone = compute_observed(fresh, other, objective)
            refuse_history(replica, other_alone, compute_observed(copied, other, objective))
            raise
        refuse_passed_on(other_first.attributes, copied)


def _computed(replica: Replica, work: ShardWork, objective: ShardObjective) -> ShardResult | None:
    """Compute a shard; return None if it can't be computed without the others (`all_gather`)."""
    try:
        return compute_observed(replica, work, objective)
    except EvenstepError:
        raise
    except Exception:
        return None


def _loss_alone(objective: ShardObjective) -> ShardObjective:
    """Return an objective without a backward pass."""

    def loss(*given: Any) -> tuple[torch.Tensor, Number]:
        total, count, *_ = objective(*given)
        return total.detach(), count

    return loss


def check_sums(
    rehearsal: Rehearsal,
    neighbours: Neighbours,
    copied: Replica | None = None,
    *,
    compares_gradients: bool,
) -> str:
    """Check that the objective adds up over shards, on a copy of the model.

    Behind a weight that starts at zero, terms that compare examples have no effect yet: so this is
    checked in later steps, too.

    Returns:
        Why it could not be judged; empty if it was.

    Raises:
        ContractError: it doesn't add up.
    """
    if len(neighbours.shards) < 2:
        return "this process has only one shard of the batch"
    replica, work = copied or rehearsal.copy() or rehearsal.replica, rehearsal.works[0]
    with kept(replica), unwritten(replica.module):
        return judge_separability(
            replica, work, neighbours, rehearsal.objective, compares_gradients=compares_gradients
        )


def check_order(rehearsal: Rehearsal) -> None:
    """Refuse a shard that depends on one before it; quicker than `check_contract`.

    Behind a weight that starts at zero, state has no effect in the first step. Of the shard before
    it, the loss alone is computed.
    """
    work, *others = rehearsal.works
    first, later = rehearsal.copy(), rehearsal.copy()
    if first is None or later is None or not others:
        return
    objective = rehearsal.objective
    with unwritten(later.module):
        if _computed(later, others[0], _loss_alone(objective)) is None:
            return
        again = compute_observed(later, work, objective)
    fresh = compute_observed(first, work, objective)
    refuse_history(rehearsal.replica, fresh, again)
    compute = functools.partial(_computed, later, work, objective)
    refuse_deciding_counts(later, fresh, again, compute)
