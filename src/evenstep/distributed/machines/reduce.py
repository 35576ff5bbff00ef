"""The sum of dense gradients over processes of several machines, inside each machine first.

The processes of a machine share memory, in which they add up the nodes of the tree that lie in its
run of shards. Only these cross the cables, and only once: the machines exchange them as processes
do (see `CanonicalSum`), with a process of each machine for each part of the vectors.

With m machines of one node each, and n bytes, a machine sends and receives 2 n (m - 1) / m bytes,
however many processes it has.
"""

from __future__ import annotations

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
from evenstep.distributed.shared.reduce import SharedMemoryReducer, SharedVectors
from evenstep.errors import PeerError


class MachineReducer(SharedMemoryReducer):
    """Sums gradients inside each machine, in its memory, then between the machines."""

    may_be_small = False

    def __init__(
        self, peers: Peers, flats: FlatSpace, bucket_bytes: int, machines: Machines
    ) -> None:
        super().__init__(peers, flats, bucket_bytes)
        self._machines = machines

    def places_of(self, trees: Forest) -> int:
        """Return how many partial sums the machine with the most of them has."""
        counts = [sum(owner in one for owner in trees.owners) for one in self._machines.ranks]
        return max(counts)

    def first_place(self, trees: Forest) -> int:
        """Return this machine's first partial sum."""
        return sum(owner < self._machines.own.ranks.start for owner in trees.owners)

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """Return memory that this machine's processes share; None if one of all processes can't."""
        found = shared_bytes(self._machines.own, nbytes)
        all_can = all(all_say(self.peers, NO if found is None else YES, "read"))
        return found if all_can else None

    def add_up(self, trees: Forest, shared: SharedVectors) -> None:
        """Compute `shared.totals`, of which this process computes its column's part."""
        machines = self._machines
        if machines.column is not None:
            try:
                pieces = self._started(trees, shared)
                for piece in pieces:
                    piece.add_up()
                for piece in pieces:
                    piece.wait()
            except PeerError as error:
                raise machines.in_column(error) from None
        machines.own.gather(b"", Exchange("step", "the sum of its part of the gradients"))

    def _started(self, trees: Forest, shared: SharedVectors) -> list[CanonicalSum]:
        """Add up, piece by piece, what this machine can, and send it."""
        machines = self._machines
        assert machines.column is not None
        assert shared.totals is not None
        left_over, adds = trees.adds_within(machines.own.ranks)
        between, first = trees.joined(machines.ranks), self.first_place(trees)
        pieces = []
        for flat, total in enumerate(shared.totals):
            start, end = even_bounds(len(total), machines.columns)[machines.own.rank]
            step = max(1, self.bucket_bytes // total.element_size())
            for lo in range(start, end, step):
                cut = slice(lo, min(lo + step, end))
                own = {first + k: row[flat][cut] for k, row in enumerate(shared.places[0])}
                for left, right in adds:
                    own[left] = own[left] + own[right]
                partials = [own[number] for number in left_over]
                name = "the gradients of all machines"
                pieces.append(
                    CanonicalSum(machines.column, between, partials, total[cut], 1 + flat, name)
                )
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
