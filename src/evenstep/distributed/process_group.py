"""The group of processes that train together, and the exchange of messages between them."""

from __future__ import annotations

import struct

import torch

from evenstep.collectives import Transport, wait_all
from evenstep.distributed.status_board import StatusBoard
from evenstep.errors import PeerError

_FRAME_BYTES = 4096
_LENGTH = struct.Struct("<q")


class Peers:
    """The processes of a job, seen from one of them.

    Args:
        transport: the connections to the others.
        hosts: the name of each process's machine, by rank.
        status_board: where each process publishes what it is doing.

    Attributes:
        rank, size: this process's number, and the number of processes.
        on_one_machine: whether all processes can share memory.
    """

    def __init__(
        self,
        transport: Transport,
        hosts: list[str],
        status_board: StatusBoard,
        *,
        on_one_machine: bool,
    ) -> None:
        self.transport = transport
        self.status_board = status_board
        self.rank = transport.rank
        self.size = transport.size
        self.hosts = hosts
        self.on_one_machine = on_one_machine

    def gather(self, message: bytes, what: str) -> list[bytes]:
        """Return every process's message, by rank; each process must call this method.

        Args:
            message: this process's message, of any length.
            what: what is waited for, for error messages.

        Raises:
            PeerError: a process did not respond within the transport's time limit, or has left.
        """
        try:
            return self._gather(message)
        except PeerError as error:
            raise self.explained(error, what) from error

    def explained(self, error: PeerError, what: str) -> PeerError:
        """Return the error with what is known of its process: host, last status, own error."""
        if error.rank is None:
            return error
        host = self.hosts[error.rank]
        failure, status = self.status_board.status_of(error.rank)
        if failure is not None:
            text = f"rank {error.rank} (on {host}) failed: {failure}"
            return PeerError(text, error.rank, reported=True)
        return PeerError(
            f"{error}: rank {self.rank} waited for {what}; rank {error.rank} is on {host}, "
            f"{status}",
            error.rank,
        )

    def leave(self, reason: str) -> None:
        """Publish why this process ends, for processes that wait for it, and close connections."""
        self.status_board.leave(reason)
        self.transport.close()

    def _gather(self, message: bytes) -> list[bytes]:
        """Exchange a frame of fixed length, then the rest of the messages that don't fit in it."""
        send, receive = self.transport.send, self.transport.receive
        others = [rank for rank in range(self.size) if rank != self.rank]
        packed = (_LENGTH.pack(len(message)) + message).ljust(_FRAME_BYTES, b"\0")
        whole = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        parts = [
            part for part in whole.split([_FRAME_BYTES, len(whole) - _FRAME_BYTES]) if len(part)
        ]
        sent = [send(part, peer) for part in parts for peer in others]
        frames = {peer: torch.empty(_FRAME_BYTES, dtype=torch.uint8) for peer in others}
        wait_all([receive(frame, peer) for peer, frame in frames.items()])
        lengths = {
            peer: _LENGTH.unpack_from(frame.numpy().data)[0] for peer, frame in frames.items()
        }
        rests = {
            peer: torch.empty(max(0, _LENGTH.size + length - _FRAME_BYTES), dtype=torch.uint8)
            for peer, length in lengths.items()
        }
        wait_all([receive(rest, peer) for peer, rest in rests.items() if len(rest)])
        wait_all(sent)
        messages = {self.rank: message}
        for peer, length in lengths.items():
            received = torch.cat([frames[peer], rests[peer]]).numpy().tobytes()
            messages[peer] = received[_LENGTH.size : _LENGTH.size + length]
        return [messages[rank] for rank in range(self.size)]
