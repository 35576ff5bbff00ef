"""The canonical sum over processes: the bits of one process, the bytes of a ring all-reduce.

Every process holds its tops (see `forest`) as flat vectors. They are cut into buckets, and each
bucket into a chunk for every process, its owner. A chunk of every top goes to its owner; the owner
adds them in the order of the tree; the sum goes back to all. Only who computes moves with the
number of processes, with bucket sizes and runs, never the order of an addition.

With p processes of one top each, and n bytes, each sends and receives 2 n (p - 1) / p bytes, which
is what a ring all-reduce moves (Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations", 2009), in 2 instead of 2 (p - 1) rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.collectives.partition import Forest
from evenstep.collectives.transport import Links, Transfer, chunk_bounds, wait_all
from evenstep.errors import PeerError

BUCKET_BYTES = 4 << 20


def canonical_sum(
    links: Links,
    forest: Forest,
    tops: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Sum the tops of all processes into `out`, which then has the same bits everywhere.

    Args:
        links: to the other processes, which call this too.
        forest: whose tops are summed, in which order.
        tops: this process's own, each (n,), of one floating dtype.
        out: (n,), of that dtype; none of the tops.
        bucket_bytes: how much is exchanged at a time, of every top.

    Raises:
        PeerError: another process did not come within the links' time limit.
    """
    elements = max(1, bucket_bytes // out.element_size())
    starts = range(0, out.numel(), elements)
    buckets = [
        CanonicalSum(
            links,
            forest,
            [top[lo : lo + elements] for top in tops],
            out[lo : lo + elements],
            name=f"the bucket from {lo} on",
        )
        for lo in starts
    ]
    for bucket in buckets:
        bucket.add_up()
    for bucket in buckets:
        bucket.wait()


class CanonicalSum:
    """A slice of the flat vectors on its way; made, it has been sent to its chunks' owners.

    Args:
        links: as for `canonical_sum`.
        forest: likewise.
        tops: this process's own of the slice, each (n,).
        out: (n,), where the sum comes to lie.
        tag: sets buckets apart which processes don't begin in the same order.
        name: of the bucket, for errors.
    """

    def __init__(
        self,
        links: Links,
        forest: Forest,
        tops: Sequence[torch.Tensor],
        out: torch.Tensor,
        *,
        tag: int = 0,
        name: str = "a bucket",
    ) -> None:
        self._links = links
        self._forest = forest
        self._out = out
        self._tag = tag
        self._name = name
        self._chunks = chunk_bounds(len(out), links.size)
        first, last = self._chunks[links.rank]
        parts = dict(zip(forest.tops_of(links.rank), tops, strict=True))
        self._sent = [
            links.send(part[slice(*self._chunks[peer])], peer, tag)
            for peer in _others(links)
            for part in parts.values()
            if self._chunks[peer][0] < self._chunks[peer][1]
        ]
        self._mine = [
            parts[top][first:last] if top in parts else torch.empty_like(out[first:last])
            for top in range(len(forest.owners))
        ]
        self._received = [
            links.receive(self._mine[top], owner, tag)
            for top, owner in enumerate(forest.owners)
            if owner != links.rank and first < last
        ]

    def add_up(self) -> None:
        """Wait for this process's chunk of every top, add it up, and send the sum on its way.

        Raises:
            PeerError: a process did not come in time, or is gone; with the bucket's name.
        """
        try:
            wait_all(self._received)
        except PeerError as error:
            raise PeerError(f"{error}, in {self._name}", error.rank) from error
        first, last = self._chunks[self._links.rank]
        total = self._out[first:last]
        add_in_order(self._forest, self._mine, total)
        links = self._links
        peers = _others(links)
        back: list[Transfer] = []
        if first < last:
            back += [links.send(total, peer, self._tag) for peer in peers]
        for peer in peers:
            chunk = self._out[slice(*self._chunks[peer])]
            if chunk.numel():
                back.append(links.receive(chunk, peer, self._tag))
        self._sent += back

    def wait(self) -> None:
        """Wait until everything has left and everything is there."""
        wait_all(self._sent)


def add_in_order(forest: Forest, tops: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum the tops into `out` in the order of the tree."""
    if not forest.adds:
        out.copy_(tops[0])
        return
    places = list(tops)
    *before, (left, right) = forest.adds
    for onto, added in before:
        places[onto] = places[onto] + places[added]
    torch.add(places[left], places[right], out=out)


def _others(links: Links) -> list[int]:
    """Return the other processes, each process beginning behind itself: none is asked by all."""
    return [(links.rank + step) % links.size for step in range(1, links.size)]
