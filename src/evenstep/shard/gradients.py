"""Sends gradients to the other processes while a backward pass still computes others.

A backward pass makes the last layers' gradients final first. With several processes, these are
summed and sent bucket by bucket, while earlier layers' gradients are computed. Each bucket has a
tree of the same shape as the tree for everything else, so the same additions in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from evenstep.collectives import TreePlan, TreeSum
from evenstep.errors import ModelError
from evenstep.private_torch.tensors import version_of
from evenstep.replicas import Replica
from evenstep.shard.partial_sum import (
    AccumulatedTwiceError,
    Tensors,
    add_gradients,
    with_own_memory,
    with_rows,
)


class Reduction(Protocol):
    """Takes this process's partial sums, bucket by bucket."""

    @property
    def buckets(self) -> Sequence[Any]:
        """The buckets; each has the `numbers` of its parameters."""

    def write(self, bucket: int, partial: int, left: Tensors, right: Tensors | None = None) -> None:
        """Take the gradients of a partial sum, left + right, in one bucket."""


class GradientStream:
    """Passes the gradients of one attempt at a step from the backward passes to `reduction`.

    Args:
        plan: which shards this process sums by itself.
        reduction: takes this process's partial sums, bucket by bucket.
        may_retry: whether sparse gradients in a bucket ask for another attempt without a stream.
    """

    def __init__(self, plan: TreePlan, reduction: Reduction, *, may_retry: bool = False) -> None:
        self._plan = plan
        self._may_retry = may_retry
        self._buckets = [bucket.numbers for bucket in reduction.buckets]
        self._trees = [
            TreeSum[Tensors](
                plan,
                functools.partial(add_gradients, tables=range(len(numbers))),
                functools.partial(reduction.write, bucket),
            )
            for bucket, numbers in enumerate(self._buckets)
        ]

    @contextmanager
    def of_shard(
        self,
        replica: Replica,
        shard: int,
        node: int,
        rows: MutableMapping[int, torch.Tensor],
        *,
        accumulates: bool,
    ) -> Iterator[None]:
        """Inside `with`, take the gradients of a backward pass as they become final.

        Args:
            replica: the replica that the backward pass runs on.
            shard: the shard's number.
            node: the node of the tree whose value the gradients become.
            rows: gets the rows of tables; they are taken out.
            accumulates: whether the backward pass adds to the gradients of the shard's left
                sibling; these are then taken from the trees.

        Raises:
            AccumulatedTwiceError: a gradient was not final (a backward pass inside the backward
                pass), or is sparse in a stream that may retry.
            ModelError: a gradient is sparse.
        """
        missing = [set(numbers) for numbers in self._buckets]
        lefts: dict[int, tuple[torch.Tensor, int]] = {}

        def put(bucket: int) -> None:
            self._put(bucket, node, replica, rows, lefts)

        def accumulated(bucket: int, i: int, _: torch.Tensor) -> None:
            """Torch calls this in the lane, when parameter `i` has got its gradient."""
            if i not in missing[bucket]:
                raise AccumulatedTwiceError(f"parameter {i} got a gradient twice in a shard")
            missing[bucket].remove(i)
            replica.has_run_backward = True
            if not missing[bucket]:
                put(bucket)

        if accumulates:
            for tree, numbers in zip(self._trees, self._buckets, strict=True):
                for i, left in zip(numbers, tree.take(self._plan.sibling[shard]), strict=True):
                    replica.parameters[i].grad = None if left is None or left.is_sparse else left
                    if left is not None:
                        lefts[i] = left, version_of(left)
        hooks = [
            replica.parameters[i].register_post_accumulate_grad_hook(
                functools.partial(accumulated, bucket, i)
            )
            for bucket, numbers in enumerate(self._buckets)
            for i in numbers
            if replica.parameters[i].requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in range(len(missing)):
            if missing[bucket]:
                put(bucket)

    def _put(
        self,
        bucket: int,
        node: int,
        replica: Replica,
        rows: MutableMapping[int, torch.Tensor],
        lefts: Mapping[int, tuple[torch.Tensor, int]],
    ) -> None:
        """Move a bucket's gradients from the replica into the bucket's tree."""
        gradients: Tensors = []
        for i in self._buckets[bucket]:
            parameter = replica.parameters[i]
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.is_sparse:
                if self._may_retry:
                    raise AccumulatedTwiceError("a function that is no layer gave one")
                raise sparse_error(replica, i)
            if i in rows or (i in lefts and lefts[i][0].is_sparse):
                given = lefts.get(i, (None, 0))
                gradient = with_rows(gradient, rows.pop(i, None), *given, may_accumulate=True)
            elif gradient is not None:
                gradient = with_own_memory(gradient)
            gradients.append(gradient)
        self._trees[bucket].put(node, gradients)


def sparse_error(replica: Replica, i: int) -> ModelError:
    """Return why parameter `i` can't have a sparse gradient."""
    name = replica.names[i]
    return ModelError(
        f"{name} got a sparse gradient, but belongs to no layer with sparse=True: with several "
        f"processes only such layers may have one"
    )
