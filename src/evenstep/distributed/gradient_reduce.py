"""The sum of dense gradients over processes: through a network, or through memory they share.

It goes bucket by bucket. A bucket may be written, and be on its way, while a backward pass still
computes others.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from evenstep.collectives import CanonicalSum, Forest, add_in_order, chunk_bounds
from evenstep.distributed.flat_buffers import FlatSpace, Gradients
from evenstep.distributed.process_group import Peers
from evenstep.distributed.shared_memory import shared_bytes
from evenstep.errors import PeerError

BUCKET_BYTES = 4 << 20


class Sending(abc.ABC):
    """The gradients of one go at a step on their way: each bucket of each own top is written once.

    Whoever begins one ends it, in every process, by `total` or (when the step is not to be taken)
    by `drop`: else others would wait for what never comes.

    Attributes:
        buckets: what is written and sent at once.
        present: for each of this process's tops and each parameter, whether it has a gradient.
    """

    def __init__(self, flats: FlatSpace, tops: int, parameters: int, bucket_bytes: int) -> None:
        self.buckets = flats.buckets(bucket_bytes)
        self.present = [[False] * parameters for _ in range(tops)]
        self._flats = flats
        self._missing = [set(range(tops)) for _ in self.buckets]
        self._lock = threading.Lock()

    def write(self, bucket: int, top: int, left: Gradients, right: Gradients | None = None) -> None:
        """Write a bucket of one of this process's tops, left + right; from any thread.

        Args:
            bucket: its number.
            top: which of this process's tops.
            left: a gradient or None for each parameter of the bucket.
            right: likewise; None to write `left` alone.
        """
        self._flats.write(self._row(top), self.buckets[bucket], left, right)
        for position, i in enumerate(self.buckets[bucket].numbers):
            absent = left[position] is None and (right is None or right[position] is None)
            self.present[top][i] = not absent
        with self._lock:
            self._missing[bucket].discard(top)
            is_whole = not self._missing[bucket]
        if is_whole:
            self._send(bucket)

    def write_rest(self, tops: Sequence[Gradients]) -> None:
        """Write what is not yet written from the gradients of this process's tops."""
        for number, bucket in enumerate(self.buckets):
            for top in sorted(self._missing[number]):
                self.write(number, top, [tops[top][i] for i in bucket.numbers])
        if not tops:  # a process without shards
            for number in range(len(self.buckets)):
                self._send(number)

    @abc.abstractmethod
    def total(self) -> list[torch.Tensor]:
        """Return the sum, a flat vector for each dtype, in memory of this process's own.

        Only called when every process has written its own.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """End it without a sum."""

    @abc.abstractmethod
    def _row(self, top: int) -> list[torch.Tensor]:
        """Return the vectors of one of this process's tops."""

    @abc.abstractmethod
    def _send(self, bucket: int) -> None:
        """Let a bucket go that all of this process's tops have written."""


class NetworkSum:
    """Through the network, chunk by chunk (`canonical_sum`), by a thread of its own."""

    def __init__(self, peers: Peers, flats: FlatSpace, bucket_bytes: int) -> None:
        self.peers = peers
        self.flats = flats
        self.bucket_bytes = bucket_bytes
        # Threads of its own would fight with the devices for the cores.
        self.thread = ThreadPoolExecutor(1, "evenstep exchange", torch.set_num_threads, (1,))

    def begin(self, trees: Forest, parameters: int, step: int) -> Sending:
        """Return where the gradients of a step go."""
        return _OverNetwork(self, trees, parameters)

    def settle(self, trees: Forest, since: int) -> None:
        """Do nothing: it is always ready."""

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()


class _OverNetwork(Sending):
    def __init__(self, way: NetworkSum, trees: Forest, parameters: int) -> None:
        tops = len(trees.tops_of(way.peers.rank))
        super().__init__(way.flats, tops, parameters, way.bucket_bytes)
        self._way = way
        self._trees = trees
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(tops)]
        self._totals: list[torch.Tensor] = []
        self._sent: set[int] = set()
        self._pieces: list[tuple[CanonicalSum, Future[None]]] = []
        self._broken: PeerError | None = None

    def total(self) -> list[torch.Tensor]:
        pieces, self._pieces = self._pieces, []
        for _, added in pieces:
            added.result()
        for piece, _ in pieces:
            piece.wait()
        return self._totals or self._flats.new()

    def drop(self) -> None:
        for bucket in set(range(len(self.buckets))) - self._sent:
            self._send(bucket)
        self.total()

    def _row(self, top: int) -> list[torch.Tensor]:
        with self._lock:
            if not self._rows[top]:
                self._rows[top] = self._flats.new()
            return self._rows[top]

    def _send(self, bucket: int) -> None:
        """Send a bucket, cut into pieces of a handy size, to its chunks' owners."""
        way, place = self._way, self.buckets[bucket]
        rows = [self._row(top)[place.flat] for top in range(len(self._rows))]
        with self._lock:
            self._sent.add(bucket)
            self._totals = self._totals or self._flats.new()
        total = self._totals[place.flat]
        elements = max(1, way.bucket_bytes // total.element_size())
        pieces = [
            CanonicalSum(
                way.peers.links,
                self._trees,
                [row[lo:hi] for row in rows],
                total[lo:hi],
                tag=1 + bucket,
                name=f"bucket {bucket} of the gradients",
            )
            for lo in range(place.lo, place.hi, elements)
            for hi in [min(lo + elements, place.hi)]
        ]
        # Not before all are sent: what has one tag arrives in the order of its sending.
        self._pieces += [(piece, way.thread.submit(self._add_up, piece)) for piece in pieces]

    def _add_up(self, piece: CanonicalSum) -> None:
        """Add a piece up, unless one before it was waited for in vain: one time limit is enough."""
        if self._broken is not None:
            raise self._broken
        try:
            piece.add_up()
        except PeerError as error:
            self._broken = error
            raise


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory that all processes map.

    Attributes:
        since: the first step that uses it.
        rows: the vectors of each top.
        totals: the vectors of the sum.
    """

    since: int
    rows: list[list[torch.Tensor]]
    totals: list[torch.Tensor]


class SharedSum:
    """Through memory that all processes map: each adds up the chunk it owns, where it lies.

    Where there is none (yet) for so many tops, the network has to do.
    """

    def __init__(self, peers: Peers, flats: FlatSpace, bucket_bytes: int) -> None:
        self.peers = peers
        self.flats = flats
        self.bucket_bytes = bucket_bytes
        self._network = NetworkSum(peers, flats, bucket_bytes)
        self.rooms: list[Room] = []
        self._can_grow = True

    def begin(self, trees: Forest, parameters: int, step: int) -> Sending:
        """Return where the gradients of a step go; the same way in every process."""
        for room in reversed(self.rooms):
            if step >= room.since and len(room.rows) >= len(trees.owners):
                return _OverMemory(self, room, trees, parameters)
        return self._network.begin(trees, parameters, step)

    def settle(self, trees: Forest, since: int) -> None:
        """Make room for so many tops from step `since` on; called by all, once a sum is there."""
        tops = len(trees.owners)
        if self._can_grow and all(len(room.rows) < tops for room in self.rooms):
            memory = shared_bytes(self.peers, self.flats.nbytes * (tops + 1))
            if memory is None:
                self._can_grow = False
                return
            *rows, last = map(self.flats.over, memory.split(self.flats.nbytes))
            self.rooms = [*self.rooms[-1:], Room(since, rows, last)]

    def close(self) -> None:
        """End the network's thread."""
        self._network.close()


class _OverMemory(Sending):
    def __init__(self, way: SharedSum, room: Room, trees: Forest, parameters: int) -> None:
        self._own = trees.tops_of(way.peers.rank)
        super().__init__(way.flats, len(self._own), parameters, way.bucket_bytes)
        self._peers = way.peers
        self._trees = trees
        self._room = room

    def total(self) -> list[torch.Tensor]:
        add_up_shared(self._peers, self._trees, self._room)
        return [total.clone() for total in self._room.totals]

    def drop(self) -> None:
        pass

    def _row(self, top: int) -> list[torch.Tensor]:
        return self._room.rows[self._own[top]]

    def _send(self, bucket: int) -> None:
        pass


def add_up_shared(peers: Peers, trees: Forest, room: Room) -> None:
    """Have the sum in the shared memory, each process adding its chunk; each must call this."""
    for flat, total in enumerate(room.totals):
        lo, hi = chunk_bounds(len(total), peers.size)[peers.rank]
        tops = [vectors[flat][lo:hi] for vectors in room.rows[: len(trees.owners)]]
        add_in_order(trees, tops, total[lo:hi])
    peers.gather(b"", "the sum of its chunk of the gradients")


def dense_sum(
    peers: Peers, flats: FlatSpace, *, on_cpus: bool, bucket_bytes: int | None = None
) -> NetworkSum | SharedSum:
    """Return the fastest way there is.

    Args:
        peers: the processes.
        flats: the parameters' places.
        on_cpus: whether all compute on CPUs.
        bucket_bytes: how much is exchanged at a time, at the least.
    """
    way = SharedSum if peers.alone and on_cpus else NetworkSum
    return way(peers, flats, bucket_bytes or BUCKET_BYTES)
