"""A reduction over processes with the bits of one process and the traffic of a ring all-reduce.

Every process holds its partial sums (see `Forest`) as flat vectors. They are cut into buckets, and
each bucket into one chunk for each process, the chunk's owner. Every process sends the owner its
chunk of each partial sum; the owner adds them in the order of the tree and sends the result to all.
The number of processes, the runs and the bucket size decide who adds, never what is added to what.

With p processes of one partial sum each, and n bytes, each sends and receives 2 n (p - 1) / p
bytes, as in a ring all-reduce (Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for
Clusters of Workstations", 2009), in 2 rounds instead of 2 (p - 1).

A small piece takes 1 round: every process sends all of it to all others, and each adds it up whole.
Two processes send no more bytes so than in 2 rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from evenstep.collectives.partition import Forest
from evenstep.collectives.transport import Transfer, Transport, even_bounds, wait_all
from evenstep.errors import PeerError

BUCKET_BYTES = 4 << 20

SMALL_BYTES = 64 << 10
"""The most bytes that a process sends in 1 round beyond those that it sends in 2."""

WHOLE_BYTES = 1 << 20
"""The largest piece that every process adds up whole: of a larger one, that takes too long."""

_TOTALS = 1 << 24  # added to the tag of what is added up, which nothing else has


def canonical_sum(
    transport: Transport,
    forest: Forest,
    partials: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Sum the partial sums of all processes into `out`, which then has the same bits everywhere.

    Args:
        transport: to the other processes, each of which must call this function too.
        forest: the partial sums of all processes, and the order in which they are added.
        partials: this process's partial sums, each of shape (n,) and of one floating dtype.
        out: shape (n,), of that dtype; it may not be one of `partials`.
        bucket_bytes: the size of the pieces in which each vector is exchanged; they are equal, and
            as few as leave none smaller, except that of a smaller vector.

    Raises:
        PeerError: another process did not arrive within the transport's time limit.
    """
    buckets = start_sum(transport, forest, partials, out, bucket_bytes=bucket_bytes)
    for bucket in buckets:
        bucket.add_up()
    for bucket in buckets:
        bucket.wait()


def start_sum(
    transport: Transport,
    forest: Forest,
    partials: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    bucket_bytes: int,
    tag: int = 0,
    name: str = "a bucket",
) -> list[CanonicalSum]:
    """Start the reduction of `canonical_sum`; its pieces must be added up, then waited for."""
    pieces = min(max(1, out.nbytes // bucket_bytes), out.numel())
    cuts = [slice(*bounds) for bounds in even_bounds(out.numel(), pieces)] if pieces else []
    return [
        CanonicalSum(transport, forest, [p[cut] for p in partials], out[cut], tag, name)
        for cut in cuts
    ]


class CanonicalSum:
    """The reduction of one piece, in progress: creating it sends each chunk to its owner.

    `partials` and `out` are a piece of those of `canonical_sum`. `tag` tells apart reductions that
    processes may start in different orders; `name` says in messages what is reduced.
    """

    def __init__(
        self,
        transport: Transport,
        forest: Forest,
        partials: Sequence[torch.Tensor],
        out: torch.Tensor,
        tag: int,
        name: str,
    ) -> None:
        self._transport, self._forest = transport, forest
        self._tag, self._name = tag, name
        rank, size = transport.rank, transport.size
        # Each process starts with the one after it, so that they don't all send to the same one.
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._is_small = takes_one_round(size, len(forest.owners), out.nbytes)
        bounds = [(0, len(out))] * size if self._is_small else even_bounds(len(out), size)
        self._chunks = [out[lo:hi] for lo, hi in bounds]
        own = dict(zip(forest.partials_of(rank), partials, strict=True))
        lo, hi = bounds[rank]
        # What is awaited when it is sent need not be asked for first.
        self._terms, self._received, self._arriving = receive_terms(
            transport, forest, {n: one[lo:hi] for n, one in own.items()}, self._chunks[rank], tag
        )
        ends = [(peer, *bounds[peer]) for peer in self._peers if self._chunks[peer].numel()]
        self._under_way: list[Transfer] = []
        if not self._is_small:
            self._under_way = [
                transport.receive(self._chunks[peer], peer, tag | _TOTALS) for peer, _, _ in ends
            ]
        self._under_way += [
            transport.send(one[lo:hi], peer, tag) for peer, lo, hi in ends for one in partials
        ]

    def add_up(self) -> None:
        """Wait for this process's chunk of every partial sum, add them, and send the result.

        Raises:
            PeerError: a process did not arrive in time or has left; the message has the name.
        """
        wait_for(self._arriving, self._name)
        total = self._chunks[self._transport.rank]
        add_in_order(self._forest, self._terms, total, self._received)
        if total.numel() and not self._is_small:
            tag, send = self._tag | _TOTALS, self._transport.send
            self._under_way += [send(total, peer, tag) for peer in self._peers]

    def wait(self) -> None:
        """Wait until everything was sent and the whole sum has arrived."""
        wait_all(self._under_way)


def takes_one_round(processes: int, partials: int, nbytes: int) -> bool:
    """Return whether every process gets all partial sums of a piece of `nbytes` whole.

    A process sends (p - 1) n k / p bytes in 1 round, for k partial sums of p processes, and
    (p - 1) n (k / p + 1) / p in 2.
    """
    sums = max(partials, processes)
    more = nbytes * (processes - 1) * (sums * (processes - 1) - processes)
    return nbytes <= WHOLE_BYTES and more <= SMALL_BYTES * processes**2


def receive_terms(
    transport: Transport,
    forest: Forest,
    own: Mapping[int, torch.Tensor],
    like: torch.Tensor,
    tag: int,
) -> tuple[list[torch.Tensor], list[int], list[Transfer]]:
    """Start to receive the terms of all other processes.

    `own` has this process's terms, by the numbers of its partial sums. All have the shape and dtype
    of `like`.

    Returns:
        All terms in the order of `forest`, the numbers of the received ones, and what must be
        waited for before they are read.
    """
    received = [number for number in range(len(forest.owners)) if number not in own]
    terms = dict(own) | {number: torch.empty_like(like) for number in received}
    arriving = [
        transport.receive(terms[number], forest.owners[number], tag)
        for number in received
        if like.numel()
    ]
    return [terms[number] for number in range(len(terms))], received, arriving


def wait_for(transfers: Iterable[Transfer], name: str) -> None:
    """Wait for transfers; an error says what they are for."""
    try:
        wait_all(transfers)
    except PeerError as error:
        raise PeerError(f"{error}, in {name}", error.rank) from error


def add_in_order(
    forest: Forest,
    partials: Sequence[torch.Tensor],
    out: torch.Tensor,
    spare: Iterable[int] = (),
) -> None:
    """Add the partial sums of all processes into `out`, in the order of the tree.

    `out` may be one of them: it is written last. Those in `spare`, by their numbers, are
    overwritten: no more memory is needed then, and less of it is read and written.
    """
    if not forest.adds:
        out.copy_(partials[0])
        return
    values, free = list(partials), set(spare)
    *before, (left, right) = forest.adds
    for onto, added in before:
        place = next((values[one] for one in (onto, added) if one in free), None)
        values[onto] = torch.add(values[onto], values[added], out=place)
        free.add(onto)
    torch.add(values[left], values[right], out=out)
