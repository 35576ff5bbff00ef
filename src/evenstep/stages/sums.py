"""Sums the gradients of each stage where they are computed, as soon as a shard leaves the stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from evenstep.collectives.table_rows import densified
from evenstep.shard.partial_sum import Tensors, add_gradients


@dataclasses.dataclass(frozen=True)
class StageBucket:
    """The parameters of a stage, by their numbers; without those that may have sparse gradients."""

    numbers: Sequence[int]


class StageSums:
    """The sums of the gradients of one attempt at a step, in a process that trains alone.

    A backward pass on the device of a stage adds its gradients to those of the other shards there,
    in a tree of the stage's own with the shape of the canonical tree.

    Args:
        buckets: the parameters of each stage that has any.

    Attributes:
        buckets: the same.
        gradients: the sum of each parameter's gradients, by its number, once all are there.
    """

    def __init__(self, buckets: Sequence[StageBucket]) -> None:
        self.buckets = buckets
        self.gradients: dict[int, torch.Tensor | None] = {}

    def write(self, bucket: int, partial: int, left: Tensors, right: Tensors | None = None) -> None:
        """Keep a stage's sum, left + right, or `left` alone.

        Args:
            bucket: the number of the stage's bucket.
            partial: 0, since a process that trains alone has one partial sum.
            left: a gradient or None for each parameter of the stage.
            right: the gradients to add.
        """
        numbers = self.buckets[bucket].numbers
        total = left if right is None else add_gradients(left, right, range(len(left)))
        dense = [one if one is None else densified(one) for one in total]
        self.gradients.update(zip(numbers, dense, strict=True))
