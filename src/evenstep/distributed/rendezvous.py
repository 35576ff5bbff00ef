"""Joins the processes that a launcher started: torchrun, or `evenstep train --processes`."""

from __future__ import annotations

import datetime
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from evenstep.distributed.accelerators.backend import BackendCollectives, connect_backend
from evenstep.distributed.gloo import GlooTransport, LateTransport
from evenstep.distributed.machines.meeting import StoreRounds, machines_of, place_of_meeting
from evenstep.distributed.machines.rounds import join_machines
from evenstep.distributed.process_group import Peers, Rounds
from evenstep.distributed.secret import (
    SECRET_FILE,
    SealedStore,
    meeting_key,
    prove,
    read_secret,
    refuse_other_job,
)
from evenstep.distributed.shared.rounds import shared_rounds
from evenstep.distributed.status_board import StatusBoard
from evenstep.errors import InputError, PeerError
from evenstep.private_torch.processes import default_store

if TYPE_CHECKING:
    from evenstep.private_torch.processes import Store

_MEETING = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")  # torch's `env://` initialization
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_PATIENCE = 2  # times the limit: NCCL ends the process at its own, before an error names the peer


def was_launched() -> bool:
    """Whether a launcher started this process as one of several.

    torchrun says so; others (DeepSpeed's, Kubeflow's PyTorchJob, a script of the user's) set the
    four variables of torch's `env://` initialization.
    """
    if not dist.is_available():
        return False
    if dist.is_initialized() or dist.is_torchelastic_launched():
        return True
    return all(variable in os.environ for variable in _MEETING)


def local_share() -> tuple[int, int]:
    """Return this process's number among those of the job on this machine, and their number.

    The launcher sets both in the environment (`LOCAL_RANK`, `LOCAL_WORLD_SIZE`). Where it doesn't
    (`torch.multiprocessing.spawn`) and the processes meet at the loopback, all are on this machine.
    """
    if not was_launched():
        return 0, 1
    if "LOCAL_RANK" not in os.environ and os.environ.get("MASTER_ADDR") in _LOOPBACK:
        return job_share()
    return _number_of("LOCAL_RANK", "0"), _number_of("LOCAL_WORLD_SIZE", "1")


def job_share() -> tuple[int, int]:
    """Return this process's rank in the job that it will join, and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if not was_launched():
        return 0, 1
    return _number_of("RANK", "0"), _number_of("WORLD_SIZE", "1")


def _number_of(variable: str, otherwise: str) -> int:
    """Return a number that the launcher has set in the environment."""
    text = os.environ.get(variable, otherwise)
    if not text.isdecimal():
        raise InputError(f"the variable {variable} is {text!r}, where a launcher sets a number")
    return int(text)


def machine_count() -> int:
    """Return how many machines the job has, as its launcher counts them (`GROUP_WORLD_SIZE`).

    Without that variable, all machines are taken to have as many processes as this one.
    """
    processes, here = job_share()[1], local_share()[1]
    launched = _number_of("GROUP_WORLD_SIZE", "0") if was_launched() else 0
    return launched or -(-processes // here)


def is_first() -> bool:
    """Whether this process is the first of its job, or the only one."""
    return job_share()[0] == 0


def restarts() -> int:
    """Return how often the launcher has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if was_launched() else 0


def join(timeout_s: float, interface: str | None = None) -> Peers:
    """Find the other processes, and connect to each of them that proves to know the job's secret.

    The variable EVENSTEP_SECRET_FILE names the file with the secret; without it there is none.

    Args:
        timeout_s: the maximum time that any wait for another process may take.
        interface: the network interface to listen on; None: the loopback if all processes are on
            one machine, else gloo's choice (GLOO_SOCKET_IFNAME, or that of the host's name).

    Raises:
        PeerError: not all processes arrive within the time limit, or one doesn't know the secret.
        InputError: the file with the secret can't be used, or the environment doesn't say where the
            processes meet.
    """
    secret = read_secret(os.environ[SECRET_FILE]) if SECRET_FILE in os.environ else b""
    store, rank, size = _meeting_point(timeout_s)
    refuse_other_job(store, secret)
    own = place_of_meeting(store, rank, size, timeout_s)
    key = meeting_key(store, own, secret, rank, size, timeout_s)
    sealed = SealedStore(own, key)
    meeting = StoreRounds(sealed, "meeting", rank, size, timeout_s)
    hosts, machines = machines_of(meeting, rank)
    interface = interface or ("lo" if len(machines) == 1 else None)

    def connected(name: str, number: int, count: int) -> GlooTransport:
        place = dist.distributed_c10d.PrefixStore(name, own)
        transport = GlooTransport(place, number, count, interface, timeout_s)
        prove(transport, key)
        return transport

    transport = LateTransport(rank, size, lambda: connected("all", rank, size))
    board = StatusBoard(sealed, rank)
    peers = Peers(transport, hosts, board, on_one_machine=len(machines) == 1)
    peers.timeout_s = timeout_s

    def connect_accelerators(device: torch.device) -> BackendCollectives:
        place = dist.distributed_c10d.PrefixStore("accelerators", own)
        patience_s = _PATIENCE * timeout_s
        group, name = connect_backend(device.type, place, rank, size, patience_s)
        return BackendCollectives(group, name, rank, size, device)

    if not secret:  # which no backend of an accelerator tests for
        peers.connect_accelerators = connect_accelerators
    through_transport, peers.rounds = peers.rounds, meeting
    faster: Rounds | None = None
    if 1 < len(machines) < size:

        def rounds_in(ranks: range) -> StoreRounds:
            place = (ranks.index(rank), len(ranks), timeout_s)
            return StoreRounds(sealed, f"machine/{ranks.start}", *place)

        faster = join_machines(peers, machines, meeting, rounds_in, connected, timeout_s)
    elif len(machines) == 1 < size:
        faster = shared_rounds(peers, timeout_s)
    peers.rounds = faster or through_transport
    return peers


def _meeting_point(timeout_s: float) -> tuple[Store, int, int]:
    if dist.is_initialized():
        return default_store(), dist.get_rank(), dist.get_world_size()
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
    except RuntimeError as error:
        raise PeerError(
            f"the processes did not meet within {timeout_s:g} s: start all of them, and make sure "
            f"that each can reach the launcher's store ({error})"
        ) from error
    except ValueError as error:
        raise InputError(
            f"this process was started as one of several, but its environment does not say where "
            f"they meet: {error}"
        ) from error
    return store, rank, size


@functools.cache
def show_reported_errors_in_one_line() -> None:
    """Show an uncaught error without a traceback if another process reports it with one.

    It takes effect when the script ends, so the hook stays for the life of the process.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, PeerError) and error.reported:
            print(f"evenstep: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            before(kind, error, traceback)

    sys.excepthook = show
