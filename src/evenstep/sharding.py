"""Cut a minibatch into shards, and shards over devices: pure functions of sizes.

A minibatch of n examples is always cut into the same V shards, whatever the devices: the
boundaries are those of `numpy.array_split` (sizes differ by at most one, the longer ones first).
Which device computes a shard moves time, never bits. (VirtualFlow, MLSys 2022, has virtual nodes
in this sense; `split_and_load` of Dive into Deep Learning, "Training on Multiple GPUs", cuts by
device.)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import optree
import torch

from evenstep.devices import Device
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


def contiguous_runs(items: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Deal `items` in their order to devices, to each a run as long as its speed deserves.

    Largest remainders (Hamilton's apportionment; of equal ones, the first devices'): equal speeds
    get runs whose lengths differ by at most one, the longer ones first.

    Args:
        items: what is dealt.
        speeds: of each device, relative to each other, at least 0; not all 0.
    """
    total = sum(speeds)
    shares = [len(items) * speed / total for speed in speeds]
    lengths = [int(share) for share in shares]
    by_remainder = sorted(
        range(len(speeds)), key=lambda device: (lengths[device] - shares[device], device)
    )
    for device in by_remainder[: len(items) - sum(lengths)]:
        lengths[device] += 1
    ends = list(itertools.accumulate(lengths))
    return [list(items[end - n : end]) for n, end in zip(lengths, ends, strict=True)]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A minibatch, cut into shards.

    Attributes:
        bounds: the examples [lo, hi) of each shard; only the first `filled` have any.
        filled: the number of shards with examples.
        views: for each shard its part of each tensor of the batch.
        structure: how a shard's tensors are nested: as the batch's are.
        versions: for each tensor of the batch how often it had been written to; None where torch
            doesn't count.
    """

    bounds: Sequence[tuple[int, int]]
    filled: int
    views: Sequence[tuple[torch.Tensor, ...]]
    structure: optree.PyTreeSpec
    versions: Sequence[int | None] = ()

    def take(self, shard: int, place: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return one shard as a batch, each tensor carried to a device by `place`.

        `place` gets a view and must return a copy in memory of its own: a shard is computed on
        tensors of exactly its own shape, never on views at an odd offset of a larger one.
        """
        return self.structure.unflatten([place(view) for view in self.views[shard]])

    def lies_on(self, taken: Batch, device: Device) -> bool:
        """Say whether a shard that was taken is where `device` computes."""
        return all(
            leaf.device == device.torch_device for leaf in self.structure.flatten_up_to(taken)
        )

    def check_unchanged(self) -> None:
        """Refuse a batch that was written to since it was cut.

        Raises:
            BatchError: it was.
        """
        if self.views and self.versions != _versions(self.views[0]):
            raise BatchError(
                "the batch was written to while its step was in flight: give each step tensors of "
                "its own, or call waitall() first, or use max_in_flight=1"
            )


NO_CUT = Cut((), 0, (), optree.treespec_tuple())
"""What is left of a minibatch that nobody needs any more."""


def cut_batch(batch: Batch, shards: int) -> Cut:
    """Cut `batch` into `shards` shards.

    Raises BatchError for a batch without tensors, with another kind of leaf, without examples, or
    whose tensors disagree in their first dimension.
    """
    leaves, structure = optree.tree_flatten(batch)
    bounds = shard_bounds(_check_examples(batch, leaves), shards)
    sizes = [hi - lo for lo, hi in bounds]
    views = list(zip(*(leaf.detach().split(sizes) for leaf in leaves), strict=True))
    return Cut(bounds, sum(size > 0 for size in sizes), views, structure, _versions(leaves))


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return how often each tensor was written to; a view counts with its base."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def count_examples(batch: Batch) -> int:
    """Return the length of the first dimension that all tensors of `batch` share.

    Raises BatchError as `cut_batch` does.
    """
    return _check_examples(batch, optree.tree_leaves(batch))


def _check_examples(batch: Batch, leaves: Sequence[object]) -> int:
    lengths = {
        leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in leaves
    }
    if len(lengths) != 1 or None in lengths:
        _refuse(batch)
    (examples,) = lengths
    if not examples:
        raise BatchError("got a batch of 0 examples: skip it, or drop the last batch")
    return examples


def _refuse(batch: Batch) -> NoReturn:
    """Say what is wrong with a batch whose tensors have not one first dimension."""
    paths, leaves, _ = optree.tree_flatten_with_path(batch)
    if not leaves:
        raise BatchError("got a batch without tensors: give at least one, examples first")
    lengths = [_first_dimension(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    got = ", ".join(
        f"{_spell(path)} has {length}" for path, length in zip(paths, lengths, strict=True)
    )
    raise BatchError(
        f"the tensors of a batch need one and the same number of examples (first dimension), "
        f"but {got}"
    )


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
