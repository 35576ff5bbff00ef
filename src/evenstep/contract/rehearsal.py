"""What a check of the contract computes: one or two shards, on copies of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import optree
import torch

from evenstep.batch import Batch
from evenstep.batch.cut import Place
from evenstep.errors import ModelError
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import ShardObjective


def cloned(batch: Batch) -> Batch:
    """Return a batch with copies of its tensors, which a shard may write to."""
    return optree.tree_map(lambda one: one.clone() if torch.is_tensor(one) else one, batch)


class SentShard(NamedTuple):
    """A shard that another process may own.

    Attributes:
        number: its number.
        take: returns its batch, each tensor copied to a device by the given function.
        examples: the number of its examples; None for a shard that is the whole batch.
        divisor: what its backward pass divides by at its root.
        seed: of its random numbers.
    """

    number: int
    take: Callable[[Place], Batch]
    examples: int | None
    divisor: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What a check computes.

    Attributes:
        replica: the replica of the calling lane; its parameters and buffers are left as they are.
        fresh_copy: returns a new copy of it.
        works: one shard of the batch, or two of the same number of examples.
        objective: computes a shard's loss as (total, count).
    """

    replica: Replica
    fresh_copy: Callable[[Replica], Replica]
    works: Sequence[ShardWork]
    objective: ShardObjective

    def copy(self) -> Replica | None:
        """Return a new copy of the model; None if it can't be copied."""
        try:
            return self.fresh_copy(self.replica)
        except ModelError:
            return None
