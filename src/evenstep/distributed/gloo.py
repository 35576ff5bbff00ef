"""Links over gloo, torch's transport between CPU processes: point to point, each wait limited."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from evenstep.collectives import Transfer
from evenstep.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GlooLinks:
    """The ways to the other processes of a group.

    Args:
        store: where the processes find each other; a prefix of this group's own.
        rank, size: this process among how many.
        interface: the network interface to listen on, "lo" within one machine; None for what the
            user says in GLOO_SOCKET_IFNAME, or else that of the host's name.
        timeout_s: the most seconds that a wait may take.
    """

    def __init__(
        self, store: Store, rank: int, size: int, interface: str | None, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        make: Any = dist.ProcessGroupGloo  # torch's stubs know but a part of it
        if interface is None:
            self._group = make(store, rank, size, self._timeout)
        else:
            options = make._Options()
            options._timeout = self._timeout
            options._devices = [make.create_device(interface=interface)]
            self._group = make(store, rank, size, options)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Begin to send `tensor`."""
        return _Transfer(self._begin(self._group.send, tensor, to, tag), to, self._timeout)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transfer:
        """Begin to receive into `tensor`."""
        return _Transfer(self._begin(self._group.recv, tensor, source, tag), source, self._timeout)

    def close(self) -> None:
        """Close the connections."""
        self._group = None

    def _begin(
        self, operation: Callable[..., dist.Work], tensor: torch.Tensor, peer: int, tag: int
    ) -> dist.Work:
        try:
            return operation([tensor], peer, tag)
        except RuntimeError as error:
            raise _told(error, peer, self._timeout) from error


class _Transfer:
    def __init__(self, work: dist.Work, peer: int, timeout: datetime.timedelta) -> None:
        self._work = work
        self._peer = peer
        self._timeout = timeout

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise _told(error, self._peer, self._timeout) from error


def _told(error: RuntimeError, peer: int, timeout: datetime.timedelta) -> PeerError:
    """Say in our words what gloo says: a time limit, or a connection that is no more."""
    text = str(error).lower()
    if "timed out" in text or "timeout" in text:  # of this wait, or of another one's before it
        return PeerError(f"rank {peer} did not come within {timeout.total_seconds():g} s", peer)
    return PeerError(f"rank {peer} is gone: its connection is closed", peer)
