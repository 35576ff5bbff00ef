"""Gradients of shards: how they add up, and how they leave while a backward pass still runs.

A backward pass makes the last layers' gradients final first. Where several processes train, these
are summed and sent, bucket by bucket, while the others are computed: a tree for each bucket, of the
same shape as the tree for everything else, so the same additions in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evenstep.collectives import TreePlan, TreeSum
from evenstep.distributed.gradient_reduce import GradientReduction
from evenstep.errors import ModelError
from evenstep.replicas import Replica
from evenstep.shard.partial_sum import AccumulatedTwiceError, Tensors, add_gradients


class GradientStream:
    """The gradients of one go at a step, from the backward passes that make them to `sending`.

    Args:
        plan: what this process sums by itself.
        sending: takes the sums of its tops, bucket by bucket.
    """

    def __init__(self, plan: TreePlan, sending: GradientReduction) -> None:
        self._plan = plan
        self._buckets = [bucket.numbers for bucket in sending.buckets]
        self._bucket_of = {i: n for n, numbers in enumerate(self._buckets) for i in numbers}
        self._trees = [
            TreeSum[Tensors](plan, add_gradients, functools.partial(sending.write, bucket))
            for bucket in range(len(self._buckets))
        ]

    @contextmanager
    def of_shard(
        self, replica: Replica, shard: int, node: int, *, accumulates: bool
    ) -> Iterator[None]:
        """Inside `with`, take the gradients of a backward pass as they become final.

        Args:
            replica: whose parameters they are of.
            shard: whose they are.
            node: of the tree, whose value they become.
            accumulates: whether onto those of the shard's left sibling, which are there.

        Raises:
            AccumulatedTwiceError: one was not final (a backward pass inside a backward pass).
            ModelError: one is sparse.
        """
        passing = _Passing(self, replica, node)
        if accumulates:
            for tree, numbers in zip(self._trees, self._buckets, strict=True):
                for i, left in zip(numbers, tree.take(self._plan.sibling[shard]), strict=True):
                    replica.parameters[i].grad = left
        hooks = [
            replica.parameters[i].register_post_accumulate_grad_hook(
                functools.partial(passing.accumulated, i)
            )
            for i in self._bucket_of
            if replica.parameters[i].requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        passing.put_rest()

    def put(self, bucket: int, node: int, gradients: Tensors) -> None:
        """Bring a bucket's gradients of a node."""
        self._trees[bucket].put(node, gradients)


class _Passing:
    """One shard's backward pass: which gradients it has made final."""

    def __init__(self, stream: GradientStream, replica: Replica, node: int) -> None:
        self._stream = stream
        self._replica = replica
        self._node = node
        self._final: set[int] = set()
        self._missing = [set(numbers) for numbers in stream._buckets]

    def accumulated(self, i: int, parameter: torch.Tensor) -> None:
        """Note that parameter `i` has got its gradient; called by torch, in the lane."""
        if i in self._final:
            raise AccumulatedTwiceError(f"parameter {i} got a gradient twice in a shard")
        self._final.add(i)
        self._replica.has_learned = True
        bucket = self._stream._bucket_of[i]
        self._missing[bucket].discard(i)
        if not self._missing[bucket]:
            self._put(bucket)

    def put_rest(self) -> None:
        """Bring the buckets in which not every parameter got a gradient."""
        for bucket, missing in enumerate(self._missing):
            if missing:
                self._put(bucket)

    def _put(self, bucket: int) -> None:
        gradients: Tensors = []
        for i in self._stream._buckets[bucket]:
            parameter = self._replica.parameters[i]
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.is_sparse:
                raise sparse_error(self._replica, i)
            gradients.append(gradient)
        self._stream.put(bucket, self._node, gradients)


def sparse_error(replica: Replica, i: int) -> ModelError:
    """Return why parameter `i` can't have a sparse gradient."""
    name = [name for name, _ in replica.module.named_parameters()][i]
    return ModelError(
        f"{name} got a sparse gradient, but belongs to no layer with sparse=True: with several "
        f"processes only such layers may have one"
    )
