"""Joining the processes that a launcher has started (torchrun, or `evenstep train --processes`)."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from evenstep.distributed.gloo import GlooLinks
from evenstep.distributed.process_group import Peers
from evenstep.distributed.status_board import Board
from evenstep.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
import functools
import sys
from types import TracebackType

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_MEMORY = Path("/dev") / "shm"


def was_launched() -> bool:
    """Whether this process is one of several that belong together."""
    if not dist.is_available():
        return False
    return dist.is_initialized() or dist.is_torchelastic_launched()


def local_share() -> tuple[int, int]:
    """Return which of how many processes of the job on this machine this one is.

    The launcher says so in the environment (`LOCAL_RANK`, `LOCAL_WORLD_SIZE`).
    """
    if not was_launched():
        return 0, 1
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the first of its job, or alone."""
    return not was_launched() or os.environ.get("RANK", "0") == "0"


def restarts() -> int:
    """Return how often the launcher has started the processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if was_launched() else 0


def join(timeout_s: float, interface: str | None = None) -> Peers:
    """Find the other processes, and connect to each.

    Args:
        timeout_s: the most seconds that any wait for another process may take.
        interface: the network interface to listen on; None: the loopback where all processes are
            on one machine, else what gloo takes (GLOO_SOCKET_IFNAME, or that of the host's name).

    Raises:
        PeerError: they are not all there within the time limit.
    """
    store, rank, size = _meeting_point(timeout_s)
    number = store.add(f"evenstep/joined/{rank}", 1)  # the trainers of a script, one by one
    mine = dist.distributed_c10d.PrefixStore(f"evenstep/{number}", store)
    mine.set(f"machine/{rank}", f"{_machine()}\n{socket.gethostname()}")
    told = [_word_of(peer, mine, timeout_s).split("\n") for peer in range(size)]
    machines, hosts = [where for where, _ in told], [host for _, host in told]
    alone = len(set(machines)) == 1
    links = GlooLinks(mine, rank, size, interface or ("lo" if alone else None), timeout_s)
    return Peers(links, hosts, Board(mine, rank), alone=alone)


def _meeting_point(timeout_s: float) -> tuple[Store, int, int]:
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
    except RuntimeError as error:
        raise PeerError(
            f"the processes did not meet within {timeout_s:g} s: all of them must be started, and "
            f"reach the launcher's store ({error})"
        ) from error
    return store, rank, size


def _word_of(peer: int, store: Store, timeout_s: float) -> str:
    try:
        store.wait([f"machine/{peer}"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerError(
            f"rank {peer} did not come within {timeout_s:g} s: every process must open the trainer",
            peer,
        ) from error
    return store.get(f"machine/{peer}").decode()


def _machine() -> str:
    """Return what processes have in common that reach each other by loopback and shared memory."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    places = [path.stat().st_ino for path in (_NETWORK, _MEMORY) if path.exists()]
    return f"{boot} {places}"


@functools.cache
def show_told_in_a_line() -> None:
    """From now on, show an uncaught error that another process shows in a line, no traceback.

    It takes effect when the script ends, so it stays for the life of the process.
    """
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, PeerError) and error.reported:
            print(f"evenstep: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            before(kind, error, traceback)

    sys.excepthook = show
