"""Cuts a minibatch into shards: the boundaries depend on its size and on V, never on devices.

The boundaries are those of `numpy.array_split`: sizes differ by at most one, the longer shards come
first. (Virtual nodes in VirtualFlow, MLSys 2022, are shards in this sense; `split_and_load` in Dive
into Deep Learning, "Training on Multiple GPUs", cuts by device instead.)
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
"""Any nesting of tuples, lists and dicts of tensors, all with the same first dimension."""


def shard_bounds(examples: int, shards: int) -> list[tuple[int, int]]:
    """Return the half-open range [lo, hi) of examples in each of the `shards` shards.

    A batch smaller than the number of shards leaves the last shards empty (lo == hi).
    """
    if shards < 1:
        raise BatchError(f"got {shards} shards: at least 1 is needed")
    size, longer = divmod(examples, shards)
    starts = [shard * size + min(shard, longer) for shard in range(shards + 1)]
    return list(itertools.pairwise(starts))


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a minibatch that one process computes: the examples of its run of shards.

    Attributes:
        examples: the number of examples in the whole minibatch.
        bounds: the examples [lo, hi) of each shard.
        runs: the shards of each process; together all shards with examples, in order.
        rank: this process's number.
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
    """A minibatch cut into shards, of which a process may hold only its own.

    Attributes:
        part: the boundaries, and which process computes which shards.
        views: for each shard that is held here, its slice of each tensor of the batch.
        structure: the nesting of the batch, which each shard has too.
        versions: how often each tensor of the batch had been written to when it was cut; None for
            tensors whose writes torch does not count.
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
        """The number of examples in each shard; 1 if only one shard has any."""
        return [1] if self.filled == 1 else [hi - lo for lo, hi in self.bounds]

    def take(self, shard: int, place: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return one shard as a batch, each tensor copied to a device by `place`.

        `place` gets a view and must return a copy in memory of its own: a shard is computed on
        tensors of exactly its own shape, never on views at an odd offset of a larger one.
        """
        return self.structure.unflatten(map(place, self.views[shard]))

    def join(self, shards: Sequence[int], place: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return some shards together as one batch, each tensor copied to a device by `place`."""
        tensors = zip(*(self.views[shard] for shard in shards), strict=True)
        return self.structure.unflatten(place(torch.cat(parts)) for parts in tensors)

    def lies_on(self, taken: Batch, device: Device) -> bool:
        """Whether all tensors of a shard returned by `take` are on `device`."""
        return all(
            leaf.device == device.torch_device for leaf in self.structure.flatten_up_to(taken)
        )

    def check_unchanged(self) -> None:
        """Refuse a batch that was written to after it was cut.

        Raises:
            BatchError: a tensor was written to.
        """
        some = next(iter(self.views.values()), ())
        if some and self.versions != _versions(some):
            raise BatchError(
                "the batch was written to while its step was in flight: give each step tensors of "
                "its own, or call waitall() first, or use max_in_flight=1"
            )


NO_CUT = Cut(Part(0, (), (range(0),)), {}, optree.treespec_tuple())
"""Replaces the cut of a finished step, to release the batch."""


def cut_batch(batch: Batch, shards: int, part: Part | None = None) -> Cut:
    """Cut `batch` into `shards` shards.

    Args:
        batch: a minibatch; or, if it has as many examples as `part` assigns to this process, this
            process's examples of one.
        shards: V.
        part: this process's part of the minibatch; None for the only process.

    Raises:
        BatchError: the batch has no tensors, another kind of leaf, no examples, or tensors whose
            first dimensions differ.
    """
    leaves, structure = optree.tree_flatten(batch)
    here = _check_examples(batch, leaves, may_be_empty=part is not None)
    tensors = [leaf.detach() for leaf in leaves]
    if part is None:
        part = Part(here, shard_bounds(here, shards), (range(min(here, shards)),))
    elif here == part.examples:
        tensors = [tensor[part.own] for tensor in tensors]
    elif here != part.own_examples:
        raise BatchError(
            f"got a batch of {here} examples, but the loader's last batch has {part.examples}, "
            f"{part.own_examples} of them for this process: give step what epoch() yields"
        )
    sizes = [part.bounds[shard][1] - part.bounds[shard][0] for shard in part.run]
    views = zip(*(tensor.split(sizes) for tensor in tensors), strict=True)
    return Cut(part, dict(zip(part.run, views, strict=True)), structure, _versions(leaves))


def cut_whole_batch(batch: Batch, shards: int, step: int = 0) -> Cut:
    """Cut a batch for the only process; `step` does not matter."""
    return cut_batch(batch, shards)


def count_examples(batch: Batch) -> int:
    """Return the first dimension of all tensors of `batch`. Raises BatchError like `cut_batch`."""
    return _check_examples(batch, optree.tree_leaves(batch))


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return how often each tensor was written to; a view shares the count of its base."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


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
    """Raise the error for a batch whose tensors don't all have the same first dimension."""
    paths, leaves, _ = optree.tree_flatten_with_path(batch)
    if not leaves:
        raise BatchError("got a batch without tensors: give at least one, examples first")
    names = ["batch" + "".join(f"[{step!r}]" for step in path) for path in paths]
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            kind = type(leaf).__name__
            raise BatchError(f"{name} is of type {kind}: give tensors, examples first")
        if leaf.ndim == 0:
            raise BatchError(f"{name} is a single number: give tensors, examples first")
    got = ", ".join(f"{name} has {len(leaf)}" for name, leaf in zip(names, leaves, strict=True))
    raise BatchError(
        f"the tensors of a batch need the same number of examples (first dimension), but {got}"
    )
