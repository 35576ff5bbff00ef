"""Where processes meet before they are connected, and which of them are on one machine."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from evenstep.distributed.secret import OPENS, SealedStore, awaited
from evenstep.distributed.shared.memory import connected, listening
from evenstep.errors import PeerError

if TYPE_CHECKING:
    from evenstep.private_torch.processes import Store

_ANNOUNCED = "evenstep/meeting"
_LOOK_S = 0.01  # between two looks whether there is an answer, or a later meeting
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


def place_of_meeting(job: Store, rank: int, size: int, timeout_s: float) -> Store:
    """Return the part of a job's store that is for one meeting; each process must call this.

    The store outlives processes that a launcher starts again, and some of these may have met more
    often than others. So the first process numbers the meetings. Each of the others asks it at the
    place that was announced last, until it answers: at an earlier place nobody does any more.

    Args:
        job: the store of the whole job.
        rank: this process's number.
        size: the number of processes.
        timeout_s: the longest wait for another process.

    Raises:
        PeerError: a process did not respond in time.
    """
    if rank > 0:
        return _answered_place(job, rank, timeout_s)
    number = job.add("evenstep/meetings", 1)
    own = dist.distributed_c10d.PrefixStore(f"evenstep/{number}", job)
    own.set("asked/0", "")
    job.set(_ANNOUNCED, str(number))
    names = [f"asked/{peer}" for peer in range(size)]
    for nonce in awaited(own, names, datetime.timedelta(seconds=timeout_s))[1:]:
        own.set(f"answered/{nonce.decode('latin-1')}", "")
    return own


def _answered_place(job: Store, rank: int, timeout_s: float) -> Store:
    """Return the place at which the first process has answered this one."""
    nonce, until_s = secrets.token_hex(), time.monotonic() + timeout_s
    answered, asked_at, own = f"answered/{nonce}", b"", job
    while True:
        if own is not job and own.check([answered]):  # a wait with a short limit would log its end
            return own
        if job.check([_ANNOUNCED]) and (announced := job.get(_ANNOUNCED)) != asked_at:
            asked_at = announced
            own = dist.distributed_c10d.PrefixStore(f"evenstep/{announced.decode()}", job)
            own.set(f"asked/{rank}", nonce)
        elif time.monotonic() > until_s:
            raise PeerError(f"rank 0 did not respond within {timeout_s:g} s: {OPENS}", 0)
        else:
            time.sleep(_LOOK_S)


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
