"""The group of processes that train together, and the exchange of messages between them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

import torch

from evenstep.collectives import Transfer, Transport, wait_all
from evenstep.distributed.accelerators.backend import BackendCollectives
from evenstep.distributed.status_board import StatusBoard
from evenstep.errors import PeerError

END = "the end of the trainer's `with`"
"""The call of processes that take no further step."""

_FRAME_BYTES = 4096
_LENGTH = struct.Struct("<q")  # of a message
_NAME_LENGTH = struct.Struct("<h")  # of the exchange's name before it


class Exchange(NamedTuple):
    """What processes exchange messages for. Every message carries it.

    Attributes:
        call: the trainer's method that every process must be in.
        what: what each process waits for.
        step: the number of the step, if the call is a step.
    """

    call: str
    what: str
    step: int | None = None

    @property
    def place(self) -> str:
        """Where a process is."""
        return self.call if self.step is None else f"{self.call} {self.step}"

    @property
    def awaited(self) -> str:
        """What a process waits for, and where."""
        if self.call == "step":
            return self.what if self.step is None else f"{self.what} of {self.place}"
        if self.call == END:
            return f"{self.what} at {END}"
        return f"{self.what} in {self.call}, which every process must call"

    def encoded(self) -> bytes:
        """Return the exchange as bytes."""
        return f"{self.call}\0{self.what}\0{'' if self.step is None else self.step}".encode()

    @classmethod
    def decoded(cls, name: bytes) -> Exchange:
        """Read what `encoded` wrote."""
        call, what, step = name.decode().split("\0")
        return cls(call, what, int(step) if step else None)


class Rounds(Protocol):
    """Gives every process the messages of all others."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every process's message, by rank; each process must call this method."""

    def close(self) -> None:
        """Let no process wait for this one."""


class Peers:
    """The processes of a job, seen from one of them.

    Attributes:
        rank, size: this process's number, and the number of processes.
        on_one_machine: whether all processes are in one network namespace.
        rounds: carry messages: through the transport, or a faster way.
        timeout_s: the maximum time that a wait may take.
        connect_accelerators: connects the processes' accelerators, given this one's; None where
            they may not be connected.
    """

    timeout_s = math.inf
    connect_accelerators: Callable[[torch.device], BackendCollectives] | None = None

    def __init__(
        self,
        transport: Transport,
        hosts: list[str],
        status_board: StatusBoard,
        *,
        on_one_machine: bool,
    ) -> None:
        self.transport = transport
        self.rounds: Rounds = TransportRounds(transport)
        self.status_board = status_board
        self.rank = transport.rank
        self.size = transport.size
        self.hosts = hosts
        self.on_one_machine = on_one_machine

    def gather(self, message: bytes, exchange: Exchange) -> list[bytes]:
        """Return every process's message, by rank; each process must call this method.

        Raises:
            PeerError: a process did not respond within the transport's time limit, has left, or
                takes part in a different exchange: then every process raises this error.
        """
        try:
            return self._gather(message, exchange.encoded())
        except PeerError as error:
            if error.rank is None:
                raise
            raise self.explained(error, exchange) from None

    def explained(self, error: PeerError, exchange: Exchange) -> PeerError:
        """Return the error with what is known of its process: host, last status, own error."""
        if error.rank is None:
            return error
        failure, status = self.status_board.status_of(error.rank)
        if failure is not None:
            return self.failed(error.rank, failure)
        return PeerError(
            f"{error}: rank {self.rank} waited for {exchange.awaited}; rank {error.rank} is on "
            f"{self.hosts[error.rank]}, {status}",
            error.rank,
        )

    def failed(self, rank: int, failure: str) -> PeerError:
        """Return the error that says that a process has failed, and with which error."""
        text = f"rank {rank} (on {self.hosts[rank]}) failed: {failure}"
        return PeerError(text, rank, reported=True)

    def leave(self, reason: str) -> None:
        """Publish why this process ends, for processes that wait for it, and close connections."""
        self.status_board.leave(reason)
        self.close()

    def close(self) -> None:
        """Close connections; processes that wait for this one get a PeerError."""
        self.rounds.close()
        self.transport.close()

    def _gather(self, message: bytes, name: bytes) -> list[bytes]:
        found = self.rounds.exchange(_NAME_LENGTH.pack(len(name)) + name + message)
        names, messages = {}, []
        for rank, one in enumerate(found):
            start = _NAME_LENGTH.size + _NAME_LENGTH.unpack_from(one)[0]
            names[rank] = one[_NAME_LENGTH.size : start]
            messages.append(one[start:])
        if any(other != name for other in names.values()):
            self._refuse_other_calls(names)  # when all have read this, and nothing is left to read
        return messages

    def _refuse_other_calls(self, names: Mapping[int, bytes]) -> None:
        """Raise an error if processes are in different calls, not only in different steps."""
        found = [Exchange.decoded(names[rank]) for rank in range(self.size)]
        if len({(one.call, one.what) for one in found}) == 1:
            return  # reports of different steps say more about them
        calls = {one.call for one in found}
        places: dict[str, str] = {}
        for rank, one in enumerate(found):
            place = one.place if len(calls) > 1 else f"{one.place} ({one.what})"
            places.setdefault(place, f"rank {rank} (on {self.hosts[rank]}) is in {place}")
        other = calls - {"step", END}
        same = "make the same calls in the same order"
        must = f"call {other.pop()}" if len(calls) == 2 and len(other) == 1 else same
        first, *others = places.values()
        raise PeerError(f"{first}, but {' and '.join(others)}: every process must {must}")


class TransportRounds:
    """Rounds of messages through a transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def exchange(self, message: bytes) -> list[bytes]:
        """Exchange a frame of fixed length, then the rest of the messages that don't fit in it."""
        own, size = self._transport.rank, self._transport.size
        others = [(own + step) % size for step in range(1, size)]
        packed = bytearray(_LENGTH.pack(len(message)) + message).ljust(_FRAME_BYTES, b"\0")
        whole = torch.frombuffer(packed, dtype=torch.uint8)
        # What is awaited when it is sent need not be asked for first.
        frames = self._awaited(dict.fromkeys(others, _FRAME_BYTES))
        sent = [self._transport.send(whole[:_FRAME_BYTES], peer) for peer in others]
        if len(packed) > _FRAME_BYTES:
            sent += [self._transport.send(whole[_FRAME_BYTES:], peer) for peer in others]
        found = _arrived(frames)
        ends = {peer: _LENGTH.size + _LENGTH.unpack_from(one)[0] for peer, one in found.items()}
        rests = {peer: end - _FRAME_BYTES for peer, end in ends.items() if end > _FRAME_BYTES}
        for peer, rest in _arrived(self._awaited(rests)).items():
            found[peer] += rest
        wait_all(sent)
        messages = {peer: one[_LENGTH.size : ends[peer]] for peer, one in found.items()}
        return [messages.get(rank, message) for rank in range(size)]

    def close(self) -> None:
        """Do nothing: whoever has opened the transport closes it."""

    def _awaited(self, lengths: Mapping[int, int]) -> _Arrivals:
        """Start to receive so many bytes from each of these processes."""
        tensors = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in lengths.items()}
        receive = self._transport.receive
        return {rank: (one, receive(one, rank)) for rank, one in tensors.items()}


_Arrivals: TypeAlias = "dict[int, tuple[torch.Tensor, Transfer]]"
"""By process, what arrives, and what must be waited for."""


def _arrived(arrivals: _Arrivals) -> dict[int, bytes]:
    wait_all([transfer for _, transfer in arrivals.values()])
    return {rank: tensor.numpy().tobytes() for rank, (tensor, _) in arrivals.items()}
