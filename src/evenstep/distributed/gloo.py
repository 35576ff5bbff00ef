"""A transport over gloo, torch's library for exchanges between CPUs."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from evenstep.collectives import Transfer, Transport
from evenstep.errors import PeerError
from evenstep.private_torch.processes import GlooOptions

if TYPE_CHECKING:
    from evenstep.private_torch.processes import Store


class GlooTransport:
    """Connections to the other processes of a group.

    Args:
        store: where the processes find each other, with a prefix for this group alone.
        rank, size: this process's number, and the number of processes.
        interface: the network interface to listen on, such as "lo"; None for the one that
            GLOO_SOCKET_IFNAME names, or else the one of the host's name.
        timeout_s: the maximum time that a wait may take.

    Raises:
        PeerError: the processes can't connect, because one has ended or can't be reached.
    """

    def __init__(
        self, store: Store, rank: int, size: int, interface: str | None, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        try:
            self._group = self._connected(store, interface)
        except RuntimeError as error:
            raise PeerError(
                f"rank {rank} can't connect to the other processes: one of them has ended, or "
                f"can't be reached through {interface or 'the network interface of this host name'}"
                f" (gloo: {str(error).splitlines()[0]})"
            ) from error

    def _connected(self, store: Store, interface: str | None) -> Any:
        make: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
        if interface is None:
            return make(store, self.rank, self.size, self._timeout)
        options = GlooOptions()
        options._timeout = self._timeout
        options._devices = [make.create_device(interface=interface)]
        return make(store, self.rank, self.size, options)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Start sending `tensor`."""
        return _Transfer(self._group.send, tensor, to, tag, self._timeout)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transfer:
        """Start receiving into `tensor`."""
        return _Transfer(self._group.recv, tensor, source, tag, self._timeout)

    def close(self) -> None:
        """Close the connections."""
        self._group = None


class LateTransport:
    """A transport that is made when it is first used: it has a connection to every process.

    Args:
        rank, size: this process's number, and the number of processes.
        make: connects; every process must come to use the transport.
    """

    def __init__(self, rank: int, size: int, make: Callable[[], Transport]) -> None:
        self.rank = rank
        self.size = size
        self._make = make
        self._made: Transport | None = None
        self._lock = threading.Lock()

    def connect(self) -> Transport:
        """Connect, unless that was done."""
        with self._lock:
            self._made = self._made or self._make()
            return self._made

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Start sending `tensor`."""
        return self.connect().send(tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transfer:
        """Start receiving into `tensor`."""
        return self.connect().receive(tensor, source, tag)

    def close(self) -> None:
        """Close the connections, if there are any."""
        if self._made is not None:
            self._made.close()


class _Transfer:
    def __init__(
        self,
        start: Callable[..., dist.Work],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        timeout: datetime.timedelta,
    ) -> None:
        self._peer, self._timeout = peer, timeout
        try:
            self._work = start([tensor], peer, tag)
        except RuntimeError as error:
            raise self._peer_error(error) from None  # gloo's text has lines of C++

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._peer_error(error) from None  # gloo's text has lines of C++

    def _peer_error(self, error: RuntimeError) -> PeerError:
        """Tell gloo's two failures apart by their text: a timeout, or a closed connection."""
        text, peer = str(error).lower(), self._peer
        if "timed out" in text or "timeout" in text:  # of this wait, or of an earlier one
            limit_s = self._timeout.total_seconds()
            return PeerError(f"rank {peer} did not respond within {limit_s:g} s", peer)
        return PeerError(f"rank {peer} has left: its connection is closed", peer)
