"""Cut a minibatch into shards, and shards over devices: pure functions of sizes.

A minibatch of n examples is always cut into the same V shards, whatever the devices: the
boundaries are those of `numpy.array_split` (sizes differ by at most one, the longer ones first).
Which device computes a shard moves time, never bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import optree
import torch

from evenstep.errors import BatchError

Batch: TypeAlias = Any
"""Any nesting of tuples, lists and dicts whose leaves are tensors of one first dimension."""


def shard_bounds(examples: int, shards: int) -> list[tuple[int, int]]:
    """Return the half-open range [lo, hi) of examples of each of the `shards` shards.

    A batch smaller than the number of shards leaves the last shards empty (lo == hi).
    """
    if shards < 1:
        raise BatchError(f"got {shards} shards: at least 1 is needed")
    size, longer = divmod(examples, shards)
    starts = [shard * size + min(shard, longer) for shard in range(shards + 1)]
    return list(itertools.pairwise(starts))


def contiguous_runs(items: Sequence[int], parts: int) -> list[list[int]]:
    """Deal `items` in their order to `parts` devices, as evenly as can be (longer runs first)."""
    return [list(items[lo:hi]) for lo, hi in shard_bounds(len(items), parts)]


def count_examples(batch: Batch) -> int:
    """Return the length of the first dimension that all tensors of `batch` share.

    Raises BatchError for a batch without tensors, with another kind of leaf, without examples, or
    whose tensors disagree.
    """
    paths, leaves, _ = optree.tree_flatten_with_path(batch)
    if not leaves:
        raise BatchError("got a batch without tensors: give at least one, examples first")
    lengths = [_first_dimension(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    if len(set(lengths)) > 1:
        got = ", ".join(
            f"{_spell(path)} has {length}" for path, length in zip(paths, lengths, strict=True)
        )
        raise BatchError(
            f"the tensors of a batch need one and the same number of examples "
            f"(first dimension), but {got}"
        )
    if lengths[0] == 0:
        raise BatchError("got a batch of 0 examples: skip it, or drop the last batch")
    return lengths[0]


def take(
    batch: Batch, bounds: tuple[int, int], place: Callable[[torch.Tensor], torch.Tensor]
) -> Batch:
    """Return the examples [lo, hi) of `batch`, each tensor carried to a device by `place`.

    `place` gets a view and must return a copy in memory of its own: a shard is computed on tensors
    of exactly its own shape, never on views at an odd offset of a larger one.
    """
    lo, hi = bounds
    return optree.tree_map(lambda tensor: place(tensor[lo:hi]), batch)


def _first_dimension(path: tuple[Any, ...], leaf: object) -> int:
    if not isinstance(leaf, torch.Tensor):
        raise BatchError(
            f"{_spell(path)} of the batch is {type(leaf).__name__}, not a tensor: "
            f"give tensors, examples first"
        )
    if leaf.ndim == 0:
        raise BatchError(
            f"{_spell(path)} of the batch is a single number: give tensors, examples first"
        )
    return leaf.shape[0]


def _spell(path: tuple[Any, ...]) -> str:
    return "batch" + "".join(f"[{step!r}]" for step in path)
