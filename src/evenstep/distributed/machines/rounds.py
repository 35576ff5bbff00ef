"""Rounds of messages over several machines, of which only one process each uses the cables."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from evenstep.collectives import Transport
from evenstep.distributed.machines.meeting import StoreRounds
from evenstep.distributed.machines.neighbours import Machines, Neighbours, renamed
from evenstep.distributed.process_group import Peers, Rounds, TransportRounds
from evenstep.distributed.shared.memory import NO, YES
from evenstep.distributed.shared.rounds import SharedRounds, shared_rounds
from evenstep.errors import PeerError

_COUNT = struct.Struct("<q")
_GONE = struct.Struct("<q")  # the rank of the process that an error is about
_FAILED, _DONE = b"\0", b"\1"
_PATIENCE = 3  # times the limit: the first process waits in the meantime for other machines


class MachineRounds:
    """Rounds in three parts: inside each machine, between the first processes, inside again.

    Args:
        machines: which processes are on which machine.
        rounds: carry messages inside this machine.

    Attributes:
        machines: as given.
    """

    def __init__(self, machines: Machines, rounds: SharedRounds) -> None:
        self.machines, self._rounds = machines, rounds
        self._column = machines.column if machines.own.rank == 0 else None

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every process's message, by rank; each process must call this method.

        Raises:
            PeerError: a process did not respond in time, or has left.
        """
        ranks = self.machines.own.ranks
        try:
            own = self._rounds.exchange(message)
            answer = b"" if self._column is None else self._from_all(own, self._column)
            answer = self._rounds.exchange(answer, _PATIENCE)[0]
        except PeerError as error:
            raise renamed(error, ranks) from None
        if answer[:1] == _FAILED:
            (rank,) = _GONE.unpack_from(answer, 1)
            text = answer[1 + _GONE.size :].decode()
            raise PeerError(text, None if rank < 0 else rank)
        return [one for part in _unpacked(answer[1:]) for one in _unpacked(part)]

    def close(self) -> None:
        """Leave: processes of this machine that wait for this one get a PeerError."""
        self._rounds.close()
        self.machines.beside.rounds.close()
        if self.machines.column is not None:
            self.machines.column.close()

    def _from_all(self, own: Sequence[bytes], column: Transport) -> bytes:
        """Return what all machines say, or the error that keeps this one from knowing."""
        try:
            return _DONE + _packed(TransportRounds(column).exchange(_packed(own)))
        except PeerError as error:
            named = self.machines.in_column(error)
            rank = -1 if named.rank is None else named.rank
            return _FAILED + _GONE.pack(rank) + str(named).encode()


def join_machines(
    peers: Peers,
    ranks: Sequence[range],
    meeting: StoreRounds,
    rounds_in: Callable[[range], Rounds],
    connect: Callable[[str, int, int], Transport],
    timeout_s: float,
) -> Rounds | None:
    """Let the processes of each machine share memory, and connect columns of them.

    Args:
        peers: all processes.
        ranks: the processes of each machine.
        meeting: carries messages between all processes until then.
        rounds_in: returns what carries messages between the processes of one machine.
        connect: returns a transport of a name to some processes: this one's number, and how many.
        timeout_s: the longest wait for another process.

    Returns:
        Rounds for all processes, or None in every process; each must call this function.
    """
    own_ranks = next(one for one in ranks if peers.rank in one)
    own = Neighbours(peers, own_ranks, rounds_in(own_ranks))
    shared = shared_rounds(own, timeout_s)
    other = shared_rounds(own, timeout_s, spin_s=0.0)  # of a thread beside those that compute
    has_both = shared is not None and other is not None
    if not all(meeting.exchange(YES if has_both else NO)) or shared is None or other is None:
        for one in (shared, other):
            if one is not None:
                one.close()
        return None
    own.rounds = shared
    beside = Neighbours(peers, own_ranks, other)
    columns = min(map(len, ranks))
    column = None
    if own.rank < columns:
        column = connect(f"column/{own.rank}", ranks.index(own_ranks), len(ranks))
    return MachineRounds(Machines(tuple(ranks), own, beside, columns, column), shared)


def _packed(messages: Sequence[bytes]) -> bytes:
    lengths = struct.pack(f"<{len(messages)}q", *map(len, messages))
    return _COUNT.pack(len(messages)) + lengths + b"".join(messages)


def _unpacked(packed: bytes) -> list[bytes]:
    (count,) = _COUNT.unpack_from(packed)
    lengths = struct.unpack_from(f"<{count}q", packed, _COUNT.size)
    found, start = [], _COUNT.size * (1 + count)
    for length in lengths:
        found.append(packed[start : start + length])
        start += length
    return found
