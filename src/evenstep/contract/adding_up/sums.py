"""Sums one node of the canonical tree a second time, plainly, and compares the bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from evenstep.collectives import TreeSum
from evenstep.collectives.tree import tree_plan
from evenstep.contract.repeat import ShardResult, are_alike
from evenstep.errors import WrongSumError
from evenstep.private_torch.tensors import rows_of
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import ShardWork, compute_shard
from evenstep.shard.loss import ShardObjective
from evenstep.shard.partial_sum import (
    AccumulatedTwiceError,
    PartialSum,
    Tensors,
    add,
    divide_gradients,
)

_DIVISOR = 3.0  # any number by which a division rounds


def refuse_wrong_sum(
    replica: Replica,
    first: ShardResult,
    second: ShardResult,
    work: ShardWork,
    objective: ShardObjective,
) -> None:
    """Add the gradients of two shards as a step does, and as plain torch does.

    A step adds and divides gradients in place, and lets a backward pass accumulate onto the sum of
    the shards to its left. Plainly, each gradient is cloned before.

    `first` was computed on `replica`, a copy of the model; `work` is the right shard. The gradients
    of both results are used up. Beside them there is one more set of gradients, and no other.

    Raises:
        WrongSumError: a parameter's gradient differs.
    """
    left, right = first.value.gradients, second.value.gradients
    onto = dataclasses.replace(first.value, gradients=_cloned(left))
    expected = _accumulated(replica, onto, work, objective)
    onto.gradients = []
    if expected is None:
        expected = [*map(_plain_mean, left, right)]
    else:
        divide_gradients(expected, _DIVISOR)
        _compare(replica, expected, map(_plain_mean, left, right))
    summed = add(first.value, second.value).gradients
    divide_gradients(summed, _DIVISOR)
    _compare(replica, summed, expected)


def _accumulated(
    replica: Replica, left: PartialSum, work: ShardWork, objective: ShardObjective
) -> Tensors | None:
    """Return the sum that a backward pass makes onto `left`; None where that isn't done."""
    tree = TreeSum(tree_plan(2, 2), add)
    tree.put(0, left)
    try:
        compute_shard(replica, work._replace(shard=1), objective=objective, tree=tree)
    except AccumulatedTwiceError:
        return None
    return tree.take_partials()[0].gradients


def _cloned(gradients: Sequence[torch.Tensor | None]) -> Tensors:
    return [one if one is None else one.clone() for one in gradients]


def _plain_mean(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        only = right if left is None else left
        return only if only is None else only / _DIVISOR
    if left.is_sparse and right.is_sparse:  # their values as they are, one behind another
        (places, values), (others, more) = rows_of(left), rows_of(right)
        both = torch.cat([places, others], 1), torch.cat([values, more])
        return (
            torch.sparse_coo_tensor(*both, left.shape, check_invariants=False).coalesce() / _DIVISOR
        )
    return (left + right) / _DIVISOR


def _compare(replica: Replica, summed: Tensors, plain: Iterable[torch.Tensor | None]) -> None:
    for name, ours, theirs in zip(replica.names, summed, plain, strict=True):
        if not are_alike(ours, theirs):
            raise WrongSumError(
                f"the sum of two shards' gradients of {name} differs from the plain sum of their "
                f"copies, so training would use a wrong gradient: this is a fault of evenstep or "
                f"of this build of torch; please report it with the model"
            )
