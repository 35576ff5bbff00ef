"""The canonical sum by collectives that only name ranks, such as those of an accelerator's backend.

Every process gives each owner its chunk of every partial sum (all_to_all), the owner adds them in
the order of the tree, and all owners give their sums to all (all_gather). It is the reduction of
`canonical_sum` without tags and without messages between two processes. What is moved where
depends on numbers of partial sums and of elements only, so no backend and no topology changes bits.

With p processes of one partial sum each, each sends and receives 2 n (p - 1) / p bytes of n, as in
a ring all-reduce. A run of shards that is no node of the tree has more partial sums, and each more
costs n (p - 1) / p bytes: see `sent_elements`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from evenstep.collectives.canonical import add_in_order
from evenstep.collectives.partition import Forest
from evenstep.collectives.transport import Transfer, even_bounds


class Collectives(Protocol):
    """Two collectives, which every process of a group must call in the same order.

    On an accelerator they are queued behind the current stream, and waiting for one makes the
    current stream wait, not the calling thread. Tensors are contiguous vectors.

    Attributes:
        rank: this process's number in the group.
        size: the number of processes.
    """

    rank: int
    size: int

    def all_to_all(
        self, out: torch.Tensor, given: torch.Tensor, taken: Sequence[int], to_each: Sequence[int]
    ) -> Transfer:
        """Start to give every process its part of `given`; `out` gets the parts given to this one.

        `to_each` has the elements for each process, `taken` those from each, by rank.
        """
        ...

    def all_gather(self, outs: Sequence[torch.Tensor], given: torch.Tensor) -> Transfer:
        """Start to give `given` to all; `outs` gets those of all by rank, all of one length."""
        ...


@dataclasses.dataclass(frozen=True)
class Parts:
    """Which part of a vector goes where, for one process.

    Attributes:
        bounds: the [lo, hi) of the chunk that each process owns.
        to_each: how many elements this process gives each owner, of all its partial sums.
        taken: how many it takes from each process, to add them up.
        longest: the length of the longest chunk, in which all chunks are gathered.
    """

    bounds: Sequence[tuple[int, int]]
    to_each: Sequence[int]
    taken: Sequence[int]
    longest: int

    @property
    def is_even(self) -> bool:
        """Whether all chunks have one length."""
        return len({hi - lo for lo, hi in self.bounds}) == 1


def parts_of(forest: Forest, elements: int, rank: int) -> Parts:
    """Return which part of a vector of so many elements goes where, for the process `rank`."""
    counts = [len(plan.partials) for plan in forest.plans]
    bounds = even_bounds(elements, len(counts))
    sizes = [hi - lo for lo, hi in bounds]
    to_each = [counts[rank] * size for size in sizes]
    return Parts(bounds, to_each, [count * sizes[rank] for count in counts], max(sizes))


def sent_elements(forest: Forest, elements: int, rank: int) -> int:
    """Return how many elements the process `rank` sends to others for the sum of a vector.

    With one partial sum, and elements that all processes share evenly, it is
    2 × elements × (p - 1) / p; each further partial sum adds elements × (p - 1) / p.
    """
    parts = parts_of(forest, elements, rank)
    others = len(parts.bounds) - 1
    return sum(parts.to_each) - parts.to_each[rank] + others * parts.longest


def ranked_sum(
    collectives: Collectives, forest: Forest, partials: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Sum the partial sums of all processes into `out`, which then has the same bits everywhere.

    Every process must call this function, in the same order as other collectives. On an accelerator
    it returns at once, and everything is queued on the current stream.

    Args:
        collectives: between the processes.
        forest: the partial sums of all processes, and the order in which they are added.
        partials: this process's partial sums, each of shape (n,) and of one floating dtype.
        out: shape (n,), of that dtype; it may not be one of `partials`.
    """
    rank, size = collectives.rank, collectives.size
    parts = parts_of(forest, len(out), rank)
    chunks = [one[lo:hi] for lo, hi in parts.bounds for one in partials]
    given = partials[0] if len(partials) == 1 else torch.cat(chunks) if chunks else out[:0]
    arrived = torch.empty(sum(parts.taken), dtype=out.dtype, device=out.device)
    collectives.all_to_all(arrived, given, parts.taken, parts.to_each).wait()
    lo, hi = parts.bounds[rank]
    terms = [*arrived.view(len(forest.owners), hi - lo)]  # by rank, as the forest numbers them
    if parts.is_even:
        own = out[lo:hi]
        add_in_order(forest, terms, own)
        sums = [out[lo:hi] for lo, hi in parts.bounds]
        collectives.all_gather(sums, own).wait()
        return
    own = torch.zeros(parts.longest, dtype=out.dtype, device=out.device)
    add_in_order(forest, terms, own[: hi - lo])
    gathered = torch.empty(size * parts.longest, dtype=out.dtype, device=out.device)
    collectives.all_gather(gathered.split(parts.longest), own).wait()
    for (lo, hi), chunk in zip(parts.bounds, gathered.split(parts.longest), strict=True):
        out[lo:hi].copy_(chunk[: hi - lo])
