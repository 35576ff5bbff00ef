"""The sum of dense gradients over the processes of one machine, in memory that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from evenstep.collectives import Forest, add_in_order, even_bounds
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import (
    GradientReduction,
    NetworkReducer,
)
from evenstep.distributed.process_group import Exchange, Peers
from evenstep.distributed.shared.memory import shared_bytes

SMALL_BYTES = 256 << 10
"""The most bytes of all partial sums that every process adds up whole, without a round more."""


@dataclasses.dataclass(frozen=True)
class SharedVectors:
    """Flat vectors in memory that all processes share, from step `since` on.

    Small ones have two places for each partial sum, used in turn: a process that is a step ahead
    must not write what others still read. Otherwise there is one, and a place for the sum.

    Attributes:
        since: the first step that uses them.
        places: the vectors of each partial sum, of all processes, in each place.
        views: in them, the gradient of each parameter.
        totals: the vectors of the sum; None where each process computes all of it.
    """

    since: int
    places: list[list[list[torch.Tensor]]]
    views: list[list[dict[int, torch.Tensor]]]
    totals: list[torch.Tensor] | None


class SharedMemoryReducer(NetworkReducer):
    """Sums gradients in shared memory: each process adds up its chunk, or all if that is little.

    A step for whose partial sums no memory is shared yet goes through the network.

    Attributes:
        shared: the vectors that are shared, of more and more partial sums.
        sums: how many sums were computed in shared memory.
    """

    def __init__(self, peers: Peers, flats: FlatSpace, bucket_bytes: int) -> None:
        super().__init__(peers, flats, bucket_bytes)
        self.shared: list[SharedVectors] = []
        self.sums = 0
        self._can_grow = flats.nbytes > 0

    def begin(self, trees: Forest, parameters: int, step: int) -> GradientReduction:
        """Start the reduction of a step's gradients, by the same method in every process."""
        for shared in reversed(self.shared):
            if step >= shared.since and len(shared.places[0]) >= self.places_of(trees):
                return self.reduction(shared, trees, parameters)
        return super().begin(trees, parameters, step)

    def reserve(self, trees: Forest, since: int) -> None:
        """Share memory for the partial sums of `trees`, to be used from step `since` on.

        Every process must call this method after the same step.
        """
        partials = self.places_of(trees)
        if self._can_grow and all(len(shared.places[0]) < partials for shared in self.shared):
            is_small = self.may_be_small and self.flats.nbytes * partials <= SMALL_BYTES
            count = 2 * partials if is_small else partials + 1
            memory = self.memory(self.flats.nbytes * count)
            if memory is None:
                self._can_grow = False
                return
            rows = [self.flats.over(row) for row in memory.split(self.flats.nbytes)]
            places = [rows[:partials], rows[partials:]] if is_small else [rows[:partials]]
            totals = None if is_small else rows[-1]
            views = [[dict(self.flats.views(row)) for row in place] for place in places]
            self.shared = [*self.shared[-1:], SharedVectors(since, places, views, totals)]

    # ---- what is different where only the processes of a machine share memory

    may_be_small = True
    """Whether each process may add up all of a small sum."""

    def places_of(self, trees: Forest) -> int:
        """Return how many partial sums need a place in the memory."""
        return len(trees.owners)

    def first_place(self, trees: Forest) -> int:
        """Return which partial sum has the first place in this process's memory."""
        return 0

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """Return memory that processes share, uint8 (nbytes,); None if one of them can't."""
        return shared_bytes(self.peers, nbytes)

    def reduction(
        self, shared: SharedVectors, trees: Forest, parameters: int
    ) -> SharedMemoryReduction:
        """Return the reduction of one attempt at a step."""
        return SharedMemoryReduction(self, shared, trees, parameters)


class SharedMemoryReduction(GradientReduction):
    """A reduction in shared memory: gradients are written there, and added up at the end."""

    def __init__(
        self, reducer: SharedMemoryReducer, shared: SharedVectors, trees: Forest, parameters: int
    ) -> None:
        first = reducer.first_place(trees)
        self._own = [one - first for one in trees.partials_of(reducer.peers.rank)]
        super().__init__(reducer.flats, len(self._own), parameters, reducer.buckets)
        self._reducer = reducer
        self._trees = trees
        self._shared = shared

    def total(self) -> list[torch.Tensor]:
        """Return the sum as flat vectors in this process's own memory."""
        totals = self._flats.new()
        if self._shared.totals is None:
            for flat, total in enumerate(totals):
                rows = self._shared.places[self._place][: len(self._trees.owners)]
                terms = [vectors[flat] for vectors in rows]
                add_in_order(self._trees, terms, total)
        else:
            self._add_up()
            for total, shared in zip(totals, self._shared.totals, strict=True):
                total.copy_(shared)
        self._reducer.sums += 1
        return totals

    def drop(self) -> None:
        """End the reduction: nobody waits for this process."""

    def _add_up(self) -> None:
        """Compute `shared.totals`; every process must come to this."""
        add_up_shared(self._reducer.peers, self._trees, self._shared)

    @property
    def _place(self) -> int:
        # The last sum is known here, so all have come to it, and have read the sum before it.
        return self._reducer.sums % len(self._shared.places)

    def _views(self, partial: int, bucket: int) -> Mapping[int, torch.Tensor]:
        return self._shared.views[self._place][self._own[partial]]

    def _send(self, bucket: int) -> None:
        pass


def add_up_shared(peers: Peers, trees: Forest, shared: SharedVectors) -> None:
    """Compute `shared.totals`, each process adding its own chunk; each must call this function."""
    assert shared.totals is not None
    for flat, total in enumerate(shared.totals):
        lo, hi = even_bounds(len(total), peers.size)[peers.rank]
        terms = [vectors[flat][lo:hi] for vectors in shared.places[0][: len(trees.owners)]]
        add_in_order(trees, terms, total[lo:hi])
    peers.gather(b"", Exchange("step", "the sum of its chunk of the gradients"))
