"""A transport between threads of one process: no network, for tests and for study."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
from concurrent.futures import Future

import torch

from evenstep.collectives.transport import Transfer
from evenstep.errors import PeerError


def connect(size: int, *, timeout_s: float = 60.0) -> list[LocalTransport]:
    """Return `size` transports that are connected to each other, one for each rank."""
    mailbox = _Mailbox()
    return [LocalTransport(rank, size, mailbox, timeout_s) for rank in range(size)]


class LocalTransport:
    """The transport of one rank; `connect` makes them."""

    def __init__(self, rank: int, size: int, mailbox: _Mailbox, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._mailbox = mailbox
        self._timeout_s = timeout_s

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Deliver a copy of `tensor` at once."""
        message = self._mailbox.message("sent", self.rank, to, tag)
        message.set_result(tensor.clone())
        return _Transfer(message, None, self.rank, self._timeout_s)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transfer:
        """Copy the next message of `source` into `tensor`, when the transfer is waited for."""
        message = self._mailbox.message("received", source, self.rank, tag)
        return _Transfer(message, tensor, source, self._timeout_s)

    def close(self) -> None:
        """Fail every receive that waits for this rank, now or later."""
        self._mailbox.close(self.rank)


@dataclasses.dataclass(frozen=True)
class _Transfer:
    message: Future[torch.Tensor]
    into: torch.Tensor | None
    source: int
    timeout_s: float

    def wait(self) -> None:
        try:
            arrived = self.message.result(self.timeout_s)
        except concurrent.futures.TimeoutError:
            raise PeerError(
                f"rank {self.source} sent nothing for {self.timeout_s:g} s", self.source
            ) from None
        if self.into is not None:
            self.into.copy_(arrived)


class _Mailbox:
    """Messages between ranks: the n-th sent with a tag is the n-th received with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple[object, ...]] = collections.Counter()
        self._one_sided: dict[tuple[object, ...], Future[torch.Tensor]] = {}
        self._closed: set[int] = set()

    def message(self, side: str, source: int, to: int, tag: int) -> Future[torch.Tensor]:
        """Return the next message; whichever of its two sides asks first creates it."""
        with self._lock:
            number = self._counts[side, source, to, tag]
            self._counts[side, source, to, tag] += 1
            key = (source, to, tag, number)
            if key in self._one_sided:
                return self._one_sided.pop(key)
            message = self._one_sided[key] = Future[torch.Tensor]()
            if side == "received" and source in self._closed:
                message.set_exception(PeerError(f"rank {source} has left", source))
            return message

    def close(self, rank: int) -> None:
        with self._lock:
            self._closed.add(rank)
            for (source, *_), message in self._one_sided.items():
                if source == rank and not message.done():
                    message.set_exception(PeerError(f"rank {rank} has left", rank))
