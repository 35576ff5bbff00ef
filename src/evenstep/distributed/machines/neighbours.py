"""The processes of this machine among those of all machines."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from evenstep.collectives import Transport
from evenstep.distributed.process_group import Exchange, Peers, Rounds
from evenstep.errors import PeerError


class Neighbours(Peers):
    """The processes of this machine, numbered among themselves; errors have their ranks among all.

    Args:
        peers: all processes.
        ranks: those of this machine.
        rounds: carry messages among them.
    """

    def __init__(self, peers: Peers, ranks: range, rounds: Rounds) -> None:
        hosts = peers.hosts[ranks.start : ranks.stop]
        super().__init__(peers.transport, hosts, peers.status_board, on_one_machine=True)
        self.rank, self.size = ranks.index(peers.rank), len(ranks)
        self.ranks, self.rounds = ranks, rounds
        self._all = peers

    def explained(self, error: PeerError, exchange: Exchange) -> PeerError:
        """Return the error with what is known of its process."""
        return self._all.explained(renamed(error, self.ranks), exchange)


@dataclasses.dataclass(frozen=True)
class Machines:
    """Which processes are on which machine, and how those of several exchange gradients.

    The first processes of all machines form a column, the second ones another, and so on, as long
    as every machine has one.

    Attributes:
        ranks: the processes of each machine.
        own: the processes of this machine.
        beside: the same processes, for a thread of each that exchanges gradients.
        columns: the number of columns.
        column: to the others of this process's column; None if it is in none.
    """

    ranks: tuple[range, ...]
    own: Neighbours
    beside: Neighbours
    columns: int
    column: Transport | None

    def meet(self, exchange: Exchange) -> None:
        """Wait, in the thread, until all processes of this machine have come to an exchange."""
        self.beside.gather(b"", exchange)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Give errors of the column the ranks that its processes have among all."""
        try:
            yield
        except PeerError as error:
            raise self.in_column(error) from None

    def in_column(self, error: PeerError) -> PeerError:
        """Return an error of the column's transport with the rank that a process has among all."""
        return renamed(error, [ranks[self.own.rank] for ranks in self.ranks])


def renamed(error: PeerError, ranks: Sequence[int]) -> PeerError:
    """Return an error about one of a few processes with that process's rank among all."""
    if error.rank is None:
        return error
    rank = ranks[error.rank]
    return PeerError(str(error).replace(f"rank {error.rank}", f"rank {rank}", 1), rank)
