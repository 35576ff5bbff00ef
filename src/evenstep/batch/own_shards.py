"""Micro-batches of the user's own as the shards of a step: packed sequences, graphs, buckets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import optree
import torch

from evenstep.batch.cut import (
    Batch,
    Cut,
    Part,
    Place,
    Precut,
    tensors_of,
    versions_of,
    without_foreign_memory,
)
from evenstep.batch.graphs import examples_in
from evenstep.batch.nesting import nest
from evenstep.batch.whole import Shared
from evenstep.errors import BatchError


class Shards(Precut):
    """A batch that you have divided yourself: its micro-batches are the shards of a step.

        trainer.step(evenstep.Shards([first, second, third]))

    Tensors of different micro-batches may have any shapes, and those of one need not agree in their
    first dimension. V, the trainer's `shards`, is the largest number of micro-batches; with fewer,
    the last shards are empty. Their number and their order are a part of what is trained.

    Args:
        batches: the micro-batches, in order; each what `step` takes: a tuple or list of its
            arguments, or its one argument.
        examples: the number of examples in each, at least 1: the weights in a mean over examples
            (`loss=`, running statistics of BatchNorm). By default the first dimension that all
            tensors of a micro-batch have in common, or 1 if they have none; the number of graphs in
            a `torch_geometric.data.Batch`.

    Raises:
        BatchError: there are no micro-batches, or `examples` does not have a number for each.
    """

    def __init__(self, batches: Sequence[Batch], examples: Sequence[int] | None = None) -> None:
        if not isinstance(batches, list | tuple) or not batches:
            raise BatchError("evenstep.Shards needs a list of micro-batches, with at least one")
        arguments = (one if isinstance(one, tuple | list) else (one,) for one in batches)
        self.batches = [nest(tuple(one)) for one in arguments]
        for number, batch in enumerate(self.batches):
            _check(number, batch)
        self.examples = [*map(_examples_of, self.batches)] if examples is None else [*examples]
        if len(self.examples) != len(self.batches) or min(self.examples) < 1:
            raise BatchError(
                f"evenstep.Shards got examples={self.examples} for {len(self.batches)} "
                f"micro-batches: give one number for each micro-batch, at least 1"
            )

    def __len__(self) -> int:
        return len(self.batches)

    def without_foreign_memory(self) -> Shards:
        """Return these with copies of tensors in memory that torch has not allocated."""
        copied = [without_foreign_memory(batch) for batch in self.batches]
        return Shards(copied, self.examples)

    def cut_alone(self, arguments: tuple[Batch, ...], shards: int) -> Cut:
        """Cut the arguments of a step, of which this is the first, for the only process."""
        return cut_own_shards(only(arguments), shards)

    def part(self, runs: tuple[range, ...], rank: int, shards: int) -> Part:
        """Return the part that a process computes, of `shards` shards in all."""
        ends = [0, *itertools.accumulate(self.examples)]
        bounds = [*itertools.pairwise(ends)] + [(ends[-1], ends[-1])] * (shards - len(self))
        return Part(ends[-1], bounds, runs, rank, own_shards=len(self))

    def cut(self, part: Part) -> Cut:
        """Return the shards of a part."""
        flat = {number: optree.tree_flatten(self.batches[number]) for number in {0, *part.run}}
        plain = {number: tuple(map(_plain, flat[number][0])) for number in part.run}
        return OwnShardsCut(
            part,
            plain,
            optree.treespec_tuple(),
            versions_of([*itertools.chain(*plain.values())]),
            structures={number: structure for number, (_, structure) in flat.items()},
        )


@dataclasses.dataclass(frozen=True)
class OwnShardsCut(Cut):
    """Micro-batches as shards, each with a nesting of its own.

    Attributes:
        structures: the nesting of the first shard, and of each that is held here.
    """

    structures: Mapping[int, optree.PyTreeSpec] = dataclasses.field(default_factory=dict)

    can_join = False

    def take(self, shard: int, place: Place) -> Batch:
        """Return one shard as a batch, each tensor copied to a device by `place`."""
        return self.structures[shard].unflatten(map(place, self.views[shard]))

    def structure_of(self, shard: int) -> optree.PyTreeSpec:
        """Return the nesting of a shard: one that is held here, or the first."""
        return self.structures[shard]

    def join(self, shards: Sequence[int], place: Place) -> NoReturn:
        """Refuse: micro-batches need not fit together."""
        raise AssertionError("micro-batches of the user's own can't be joined")

    def held(self) -> Iterator[torch.Tensor]:
        """Yield the tensors whose writes are counted."""
        yield from itertools.chain(*self.views.values())


def _plain(leaf: torch.Tensor | Shared) -> torch.Tensor:
    return (leaf.tensor if isinstance(leaf, Shared) else leaf).detach()


def _check(number: int, batch: Batch) -> None:
    for leaf in optree.tree_leaves(batch):
        tensor = leaf.tensor if isinstance(leaf, Shared) else leaf
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise BatchError(
                f"micro-batch {number} of evenstep.Shards holds a value of type "
                f"{type(tensor).__name__}: give dense tensors, numbers and strings"
            )
    if not tensors_of(batch):
        raise BatchError(f"micro-batch {number} of evenstep.Shards has no tensor: leave it out")


def _examples_of(batch: Batch) -> int:
    graphs = examples_in(batch)
    if graphs is not None:
        return max(1, graphs)
    lengths = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_of(batch)}
    return max(1, lengths.pop()) if len(lengths) == 1 else 1


def cut_own_shards(batch: Shards, shards: int, part: Part | None = None) -> Cut:
    """Return the micro-batches of a step as its shards.

    Raises:
        BatchError: there are more than V.
    """
    if len(batch) > shards:
        raise BatchError(
            f"got evenstep.Shards of {len(batch)} micro-batches, but a step has at most {shards} "
            f"shards: use Trainer(shards={len(batch)})"
        )
    return batch.cut(part or batch.part((range(len(batch)),), 0, shards))


def only(batch: tuple[Batch, ...]) -> Shards:
    """Return the micro-batches that a step is given. Raises BatchError if it is given more."""
    if len(batch) > 1:
        raise BatchError(
            "got evenstep.Shards and other arguments: put the others into each micro-batch"
        )
    shards: Shards = batch[0]
    return shards


def in_own_memory(batch: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """Return a batch with copies of tensors in memory that torch has not allocated."""
    if batch and type(batch[0]) is Shards:
        return (only(batch).without_foreign_memory(),)
    copied: tuple[Batch, ...] = without_foreign_memory(batch)
    return copied
