"""Where processes meet before they are connected, and which of them are on one machine."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from evenstep.distributed.secret import SealedStore, awaited
from evenstep.distributed.shared.memory import connected, listening

_REACHED = "reached"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = "/proc/self/ns/net"


class StoreRounds:
    """Rounds of messages through a store: they need no connection between two processes.

    Args:
        store: where the processes meet.
        name: tells these rounds apart from others in the store.
        rank, size: this process's number among those that take part, and their number.
        timeout_s: the longest wait for another process.
    """

    def __init__(
        self, store: SealedStore, name: str, rank: int, size: int, timeout_s: float
    ) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._limit = datetime.timedelta(seconds=timeout_s)
        self._count = 0

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every process's message, by rank; each process must call this method.

        Raises:
            PeerError: a process did not respond in time.
        """
        self._count += 1
        names = [f"{self._name}/{self._count}/{rank}" for rank in range(self._size)]
        self._store.set(names[self._rank], message.decode("latin-1"))
        found = awaited(self._store, names, self._limit)
        return [one.decode().encode("latin-1") for one in found]

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def machines_of(rounds: StoreRounds, rank: int) -> tuple[list[str], list[range]]:
    """Return the host of each process, and the processes of each machine, in their order.

    A machine is what has one network: its processes reach each other by loopback. That is proved by
    a connection, as names prove nothing: the first of them listens on a random name, which only
    processes in its network namespace can connect to. Each process must call this function.
    """
    said = rounds.exchange(f"{socket.gethostname()}\n{_network()}".encode())
    hosts, networks = zip(*(one.decode().split("\n") for one in said), strict=True)
    alike = neighbours(networks)
    own = next(machine for machine in alike if rank in machine)
    with contextlib.ExitStack() as opened:
        name = ""
        if rank == own.start:
            name, _ = opened.enter_context(listening())
        names = [one.decode() for one in rounds.exchange(name.encode())]
        proof = name
        if rank != own.start:
            link = opened.enter_context(connected(names[own.start]))
            proof = _REACHED if link is not None else ""
        proofs = rounds.exchange(proof.encode())
    found: list[range] = []
    for machine in alike:
        is_proved = all(proofs[one] for one in machine)
        found += [machine] if is_proved else [range(one, one + 1) for one in machine]
    return [*hosts], found


def neighbours(places: Sequence[str]) -> list[range]:
    """Return the runs of processes that have the same place."""
    ends = itertools.accumulate(len([*run]) for _, run in itertools.groupby(places))
    return [range(*pair) for pair in itertools.pairwise([0, *ends])]


def _network() -> str:
    """Return what is different on another machine, and most often the same on one."""
    try:
        return f"{_BOOT.read_text('utf-8').strip()} {os.stat(_NETWORK).st_ino}"
    except OSError:
        return socket.gethostname()
