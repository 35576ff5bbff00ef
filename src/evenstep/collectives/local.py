"""Links between threads of one process: the real thing without a network, for tests and study."""

from __future__ import annotations

import collections
import concurrent.futures
import threading

import torch

from evenstep.collectives.transport import Transfer
from evenstep.errors import PeerError


class LocalLinks:
    """One of several ends in one process; `connect` makes them."""

    def __init__(self, rank: int, wires: list[list[_Cable]], timeout_s: float) -> None:
        self.rank = rank
        self.size = len(wires)
        self._wires = wires
        self._timeout_s = timeout_s

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Send a copy of `tensor` at once."""
        self._wires[self.rank][to].wire(tag).to_send().set_result(tensor.clone())
        return _Left()

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transfer:
        """Take the next tensor of `source`, once somebody waits for it."""
        arrival = self._wires[source][self.rank].wire(tag).to_receive()
        return _Arrival(arrival, tensor, source, self._timeout_s)

    def close(self) -> None:
        """Let nothing more come from here."""
        for cable in self._wires[self.rank]:
            cable.close(PeerError(f"rank {self.rank} is gone", self.rank))


def connect(size: int, *, timeout_s: float = 60.0) -> list[LocalLinks]:
    """Return `size` ends that are linked to each other."""
    wires = [[_Cable() for _ in range(size)] for _ in range(size)]
    return [LocalLinks(rank, wires, timeout_s) for rank in range(size)]


class _Cable:
    """What goes from one end to another: a wire for each tag."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wires: dict[int, _Wire] = {}
        self._closed: PeerError | None = None

    def wire(self, tag: int) -> _Wire:
        with self._lock:
            if tag not in self._wires:
                self._wires[tag] = _Wire()
                if self._closed:
                    self._wires[tag].close(self._closed)
            return self._wires[tag]

    def close(self, error: PeerError) -> None:
        with self._lock:
            self._closed = error
            for wire in self._wires.values():
                wire.close(error)


class _Wire:
    """What has one tag: the n-th sent is the n-th received."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed: PeerError | None = None
        self._sent: collections.deque[concurrent.futures.Future[torch.Tensor]] = collections.deque()
        self._wanted: collections.deque[concurrent.futures.Future[torch.Tensor]] = (
            collections.deque()
        )

    def close(self, error: PeerError) -> None:
        with self._lock:
            self._closed = error
            while self._wanted:
                self._wanted.popleft().set_exception(error)

    def to_send(self) -> concurrent.futures.Future[torch.Tensor]:
        return self._next(self._wanted, self._sent)

    def to_receive(self) -> concurrent.futures.Future[torch.Tensor]:
        return self._next(self._sent, self._wanted)

    def _next(
        self,
        there: collections.deque[concurrent.futures.Future[torch.Tensor]],
        missing: collections.deque[concurrent.futures.Future[torch.Tensor]],
    ) -> concurrent.futures.Future[torch.Tensor]:
        with self._lock:
            if there:
                return there.popleft()
            missing.append(concurrent.futures.Future())
            if self._closed and missing is self._wanted:
                missing[-1].set_exception(self._closed)
            return missing[-1]


class _Left:
    def wait(self) -> None:
        pass


class _Arrival:
    def __init__(
        self,
        arrival: concurrent.futures.Future[torch.Tensor],
        into: torch.Tensor,
        source: int,
        timeout_s: float,
    ) -> None:
        self._arrival = arrival
        self._into = into
        self._source = source
        self._timeout_s = timeout_s

    def wait(self) -> None:
        try:
            self._into.copy_(self._arrival.result(self._timeout_s))
        except concurrent.futures.TimeoutError:
            raise PeerError(
                f"rank {self._source} sent nothing for {self._timeout_s:g} s", self._source
            ) from None
