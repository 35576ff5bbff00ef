"""Cut a minibatch into shards, and shards over devices: pure functions of sizes.

A minibatch of n examples is always cut into the same V shards, whatever the devices: the
boundaries are those of `numpy.array_split` (sizes differ by at most one, the longer ones first).
Which device computes a shard moves time, never bits. (VirtualFlow, MLSys 2022, has virtual nodes
in this sense; `split_and_load` of Dive into Deep Learning, "Training on Multiple GPUs", cuts by
device.)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Part:
    """What a process has of a minibatch: the examples of its run of shards.

    Attributes:
        examples: of the whole minibatch.
        bounds: the examples [lo, hi) of each shard.
        runs: for each process its shards; together those with examples, in order.
        rank: this process among them.
    """

    examples: int
    bounds: Sequence[tuple[int, int]]
    runs: tuple[range, ...]
    rank: int = 0

    @functools.cached_property
    def run(self) -> range:
        """The shards of this process."""
        return self.runs[self.rank]

    @property
    def own(self) -> slice:
        """The examples of this process."""
        run = self.run
        return slice(self.bounds[run.start][0], self.bounds[run.stop - 1][1]) if run else slice(0)

    @property
    def own_examples(self) -> int:
        """The number of examples of this process."""
        return len(range(self.examples)[self.own])


@dataclasses.dataclass(frozen=True)
class Cut:
    """A minibatch, cut into shards; of several processes each may have only its own.

    Attributes:
        part: where it is cut, and which process has what.
        views: for each shard that is here its part of each tensor of the batch.
        structure: how a shard's tensors are nested: as the batch's are.
        versions: for each tensor of the batch how often it had been written to; None where torch
            doesn't count.
    """

    part: Part
    views: Mapping[int, tuple[torch.Tensor, ...]]
    structure: optree.PyTreeSpec
    versions: Sequence[int | None] = ()

    @functools.cached_property
    def bounds(self) -> Sequence[tuple[int, int]]:
        """The examples [lo, hi) of each shard; only the first `filled` have any."""
        return self.part.bounds

    @functools.cached_property
    def filled(self) -> int:
        """The number of shards with examples."""
        return min(self.part.examples, len(self.part.bounds))

    @functools.cached_property
    def weights(self) -> list[int]:
        """For each shard its examples; 1 for the only one that has any."""
        return [1] if self.filled == 1 else [hi - lo for lo, hi in self.bounds]

    def take(self, shard: int, place: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return one shard as a batch, each tensor carried to a device by `place`.

        `place` gets a view and must return a copy in memory of its own: a shard is computed on
        tensors of exactly its own shape, never on views at an odd offset of a larger one.
        """
        return self.structure.unflatten(map(place, self.views[shard]))

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
        some = next(iter(self.views.values()), ())
        if some and self.versions != _versions(some):
            raise BatchError(
                "the batch was written to while its step was in flight: give each step tensors of "
                "its own, or call waitall() first, or use max_in_flight=1"
            )


NO_CUT = Cut(Part(0, (), (range(0),)), {}, optree.treespec_tuple())
"""What is left of a minibatch that nobody needs any more."""


def whole(examples: int, shards: int) -> Part:
    """Return the part of a process that is alone: everything."""
    return Part(examples, shard_bounds(examples, shards), (range(min(examples, shards)),))


def cut_batch(batch: Batch, shards: int, part: Part | None = None) -> Cut:
    """Cut `batch` into `shards` shards.

    Args:
        batch: a minibatch, or, if it is as long as `part` says, this process's examples of one.
        shards: V.
        part: what this process has of its next minibatch; None for one that is alone.

    Raises:
        BatchError: a batch without tensors, with another kind of leaf, without examples, or whose
            tensors disagree in their first dimension.
    """
    leaves, structure = optree.tree_flatten(batch)
    here = _check_examples(batch, leaves, may_be_empty=part is not None)
    tensors = [leaf.detach() for leaf in leaves]
    if part is None:
        part = whole(here, shards)
    elif here == part.examples:
        tensors = [tensor[part.own] for tensor in tensors]
    elif here != part.own_examples:
        raise BatchError(
            f"got a batch of {here} examples, but the loader's last batch has {part.examples}, of "
            f"which {part.own_examples} are this process's: give step what epoch() yields"
        )
    sizes = [part.bounds[shard][1] - part.bounds[shard][0] for shard in part.run]
    views = zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
    mine = dict(zip(part.run, views, strict=True))
    return Cut(part, mine, structure, _versions(leaves))


def cut_whole_batch(batch: Batch, shards: int, step: int = 0) -> Cut:
    """Cut a batch that one process has whole; the same for every step."""
    return cut_batch(batch, shards)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return how often each tensor was written to; a view counts with its base."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def count_examples(batch: Batch) -> int:
    """Return the length of the first dimension that all tensors of `batch` share.

    Raises BatchError as `cut_batch` does.
    """
    return _check_examples(batch, optree.tree_leaves(batch))


def _check_examples(batch: Batch, leaves: Sequence[object], *, may_be_empty: bool = False) -> int:
    lengths = {
        leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in leaves
    }
    if len(lengths) != 1 or None in lengths:
        _refuse(batch)
    (examples,) = lengths
    assert examples is not None
    if not examples and not may_be_empty:
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
