"""The sum of dense gradients over processes of several machines, inside each machine first.

The processes of a machine share memory, in which they add up the nodes of the tree that lie in its
run of shards. Only these cross the cables, and only once: the machines exchange them as processes
do (see `CanonicalSum`), with a process of each machine for each part of the vectors.

With m machines of one node each, and n bytes, a machine sends and receives 2 n (m - 1) / m bytes,
however many processes it has.
"""

from __future__ import annotations

import threading

import torch

from evenstep.collectives import CanonicalSum, Forest, even_bounds
from evenstep.distributed.accelerators.backend import BackendCollectives
from evenstep.distributed.accelerators.reduce import BackendReducer
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import BUCKET_BYTES, NetworkReducer
from evenstep.distributed.machines.neighbours import Machines
from evenstep.distributed.machines.rounds import MachineRounds
from evenstep.distributed.process_group import Exchange, Peers
from evenstep.distributed.shared.memory import NO, YES, all_say, shared_bytes
from evenstep.distributed.shared.reduce import (
    SharedMemoryReducer,
    SharedMemoryReduction,
    SharedVectors,
)


class MachineReducer(SharedMemoryReducer):
    """Sums gradients inside each machine, in its memory, then between the machines."""

    may_be_small = False

    def __init__(
        self, peers: Peers, flats: FlatSpace, bucket_bytes: int, machines: Machines
    ) -> None:
        super().__init__(peers, flats, bucket_bytes)
        self.machines = machines
        self._latest: _MachineReduction | None = None

    def close(self) -> None:
        """End the thread, even if a reduction was given up."""
        if self._latest is not None:
            self._latest.let_go()
        super().close()

    def places_of(self, trees: Forest) -> int:
        """Return how many partial sums the machine with the most of them has."""
        counts = [sum(owner in one for owner in trees.owners) for one in self.machines.ranks]
        return max(counts)

    def first_place(self, trees: Forest) -> int:
        """Return this machine's first partial sum."""
        return sum(owner < self.machines.own.ranks.start for owner in trees.owners)

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """Return memory that this machine's processes share; None if one of all processes can't."""
        found = shared_bytes(self.machines.own, nbytes)
        all_can = all(all_say(self.peers, NO if found is None else YES, "read"))
        return found if all_can else None

    def reduction(
        self, shared: SharedVectors, trees: Forest, parameters: int
    ) -> SharedMemoryReduction:
        """Return a reduction of which this process adds up its column's part."""
        self._latest = _MachineReduction(self, shared, trees, parameters)
        return self._latest


class _MachineReduction(SharedMemoryReduction):
    """A reduction whose buckets cross the cables while backward passes compute the others.

    A thread takes the buckets in the order in which backward passes end with them. It waits until
    all processes of this machine have written one, then adds up and sends its column's part of it.
    """

    def __init__(
        self, reducer: MachineReducer, shared: SharedVectors, trees: Forest, parameters: int
    ) -> None:
        super().__init__(reducer, shared, trees, parameters)
        self._machines, self._bucket_bytes = reducer.machines, reducer.bucket_bytes
        self._first = reducer.first_place(trees)
        self._left_over, self._adds = trees.adds_within(self._machines.own.ranks)
        self._between = trees.joined(self._machines.ranks)
        self._written = [threading.Event() for _ in self.buckets]
        self._summed = reducer.thread.submit(self._sum_all)

    def drop(self) -> None:
        """End without a sum: what other processes wait for is sent, whatever it is."""
        self.let_go()
        self._summed.result()

    def let_go(self) -> None:
        """Let the thread wait for no bucket of this process."""
        for written in self._written:
            written.set()

    def _send(self, bucket: int) -> None:
        self._written[bucket].set()

    def _add_up(self) -> None:
        self._summed.result()

    def _sum_all(self) -> None:
        """Compute `shared.totals`, with all other processes; called in the thread.

        While a bucket is under way to the other machines, the one before it is added up.
        """
        machines = self._machines
        under_way: list[CanonicalSum] = []
        added_up: list[CanonicalSum] = []
        for number in reversed(range(len(self.buckets))):
            self._written[number].wait()
            machines.meet(Exchange("step", f"bucket {number} of the gradients"))
            with machines.named():
                before, under_way = under_way, self._started(number)
                added_up += _add_up_all(before)
        with machines.named():
            for piece in (*added_up, *_add_up_all(under_way)):
                piece.wait()
        machines.meet(Exchange("step", "the sum of its part of the gradients"))

    def _started(self, number: int) -> list[CanonicalSum]:
        """Add up this machine's part of a bucket, as far as that can be, and send it in pieces."""
        machines, bucket = self._machines, self.buckets[number]
        if machines.column is None:
            return []
        assert self._shared.totals is not None
        total = self._shared.totals[bucket.flat]
        start, end = even_bounds(bucket.hi - bucket.lo, machines.columns)[machines.own.rank]
        step = max(1, self._bucket_bytes // total.element_size())
        pieces = []
        for lo in range(bucket.lo + start, bucket.lo + end, step):
            cut = slice(lo, min(lo + step, bucket.lo + end))
            rows = enumerate(self._shared.places[0])
            own = {self._first + k: row[bucket.flat][cut] for k, row in rows}
            for left, right in self._adds:
                own[left] = own[left] + own[right]
            partials = [own[one] for one in self._left_over]
            name = f"bucket {number} of the gradients of all machines"
            pieces.append(
                CanonicalSum(machines.column, self._between, partials, total[cut], 1 + number, name)
            )
        return pieces


def _add_up_all(pieces: list[CanonicalSum]) -> list[CanonicalSum]:
    for piece in pieces:
        piece.add_up()
    return pieces


def gradient_reducer(
    peers: Peers,
    flats: FlatSpace,
    *,
    on_cpus: bool,
    collectives: BackendCollectives | None = None,
) -> NetworkReducer:
    """Return the fastest reducer that is available."""
    if collectives is not None:
        return BackendReducer(peers, flats, BUCKET_BYTES, collectives)
    if on_cpus and isinstance(peers.rounds, MachineRounds):
        return MachineReducer(peers, flats, BUCKET_BYTES, peers.rounds.machines)
    make = SharedMemoryReducer if peers.on_one_machine and on_cpus else NetworkReducer
    return make(peers, flats, BUCKET_BYTES)
