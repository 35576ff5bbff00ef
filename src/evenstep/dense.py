"""The sum of dense gradients over processes: through a network, or through memory they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from evenstep.collectives import Forest, add_in_order, canonical_sum, chunk_bounds
from evenstep.flat import FlatSpace
from evenstep.processes import Peers, shared_bytes

Gradients: TypeAlias = "Sequence[torch.Tensor | None]"


class DenseSum(Protocol):
    """How the processes' flat gradients are summed: `put` by each, then told, then `total`."""

    def put(self, trees: Forest, tops: Sequence[Gradients]) -> None:
        """Take the gradients of this process's tops."""
        ...

    def total(self, trees: Forest) -> list[torch.Tensor]:
        """Return the sum, a flat vector for each dtype, in memory of this process's own.

        Only called when every process has put its own.
        """
        ...


class NetworkSum:
    """Through the network, chunk by chunk (`canonical_sum`)."""

    def __init__(self, peers: Peers, flats: FlatSpace) -> None:
        self._peers = peers
        self._flats = flats
        self._own: list[list[torch.Tensor]] = []

    def put(self, trees: Forest, tops: Sequence[Gradients]) -> None:
        """Take the gradients of this process's tops."""
        self._own = [self._flats.new() for _ in tops]
        for vectors, gradients in zip(self._own, tops, strict=True):
            self._flats.fill(vectors, gradients)

    def total(self, trees: Forest) -> list[torch.Tensor]:
        """Return the sum, a flat vector for each dtype."""
        totals = self._flats.new()
        for flat, total in enumerate(totals):
            own = [vectors[flat] for vectors in self._own]
            canonical_sum(self._peers.links, trees, own, total)
        self._own = []
        return totals


class SharedSum:
    """Through memory that all processes map: each adds up the chunk it owns, where it lies.

    It grows with the number of tops. Where there is no more of it, the network has to do.
    """

    def __init__(self, peers: Peers, flats: FlatSpace) -> None:
        self._peers = peers
        self._flats = flats
        self._tops: list[list[torch.Tensor]] = []
        self._totals: list[torch.Tensor] = []
        self._instead: NetworkSum | None = None

    def put(self, trees: Forest, tops: Sequence[Gradients]) -> None:
        """Take the gradients of this process's tops."""
        if len(trees.owners) > len(self._tops) and self._instead is None:
            self.make_room(len(trees.owners))
        if self._instead is not None:
            self._instead.put(trees, tops)
            return
        for top, gradients in zip(trees.tops_of(self._peers.rank), tops, strict=True):
            self._flats.fill(self._tops[top], gradients)

    def total(self, trees: Forest) -> list[torch.Tensor]:
        """Return the sum, a flat vector for each dtype."""
        if self._instead is not None:
            return self._instead.total(trees)
        self.add_up(trees)
        return [total.clone() for total in self._totals]

    def make_room(self, tops: int) -> None:
        """Map new memory, for so many tops; each process must call this."""
        memory = shared_bytes(self._peers, self._flats.nbytes * (tops + 1))
        if memory is None:
            self._instead = NetworkSum(self._peers, self._flats)
            return
        *rows, last = memory.split(self._flats.nbytes)
        self._tops = [self._flats.over(row) for row in rows]
        self._totals = self._flats.over(last)

    def add_up(self, trees: Forest) -> None:
        """Have the sum in the shared memory, each process adding its chunk."""
        for flat, total in enumerate(self._totals):
            lo, hi = chunk_bounds(len(total), self._peers.size)[self._peers.rank]
            tops = [vectors[flat][lo:hi] for vectors in self._tops[: len(trees.owners)]]
            add_in_order(trees, tops, total[lo:hi])
        self._peers.gather(b"", "the sum of its chunk of the gradients")


def dense_sum(peers: Peers, flats: FlatSpace, *, on_cpus: bool) -> DenseSum:
    """Return the fastest way there is.

    Args:
        peers: the processes.
        flats: the parameters' places.
        on_cpus: whether all compute on CPUs.
    """
    return SharedSum(peers, flats) if peers.alone and on_cpus else NetworkSum(peers, flats)
