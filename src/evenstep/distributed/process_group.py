"""The processes that train together, and what they tell each other."""

from __future__ import annotations

import struct

import torch

from evenstep.collectives import Links, wait_all
from evenstep.distributed.status_board import Board
from evenstep.errors import PeerError

_FRAME_BYTES = 4096
_LENGTH = struct.Struct("<q")


class Peers:
    """Bytes from every process to every other one.

    Args:
        links: the ways to them.
        hosts: the name of each one's machine.
        board: where each says what it is doing.

    Attributes:
        rank, size: this process among how many.
        alone: whether all are on one machine, as far as shared memory goes.
    """

    def __init__(self, links: Links, hosts: list[str], board: Board, *, alone: bool) -> None:
        self.links = links
        self.board = board
        self.rank = links.rank
        self.size = links.size
        self.hosts = hosts
        self.alone = alone

    def gather(self, message: bytes, what: str) -> list[bytes]:
        """Return every process's message, by rank; each must call this.

        A message has no fixed length: what doesn't fit into the first frame follows in a second.

        Args:
            message: this process's.
            what: is waited for, for the error.

        Raises:
            PeerError: a process did not come within the links' time limit, or has left.
        """
        try:
            return self._gather(message)
        except PeerError as error:
            raise self.told(error, what) from error

    def told(self, error: PeerError, what: str) -> PeerError:
        """Return an error with all that is known: who, where, waited for what, doing what."""
        if error.rank is None:
            return error
        host = self.hosts[error.rank]
        story, seen = self.board.word_of(error.rank)
        if story is not None:
            failed = f"rank {error.rank} (on {host}) failed: {story}"
            return PeerError(failed, error.rank, reported=True)
        return PeerError(
            f"{error}: rank {self.rank} waited for {what}; rank {error.rank} is on {host}, {seen}",
            error.rank,
        )

    def leave(self, story: str) -> None:
        """Let those who wait for this process, now or later, know why it is gone."""
        self.board.leave(story)
        self.links.close()

    def _gather(self, message: bytes) -> list[bytes]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        frame, rest = _packed(message)
        sent = [self.links.send(frame, peer) for peer in others]
        if rest.numel():
            sent += [self.links.send(rest, peer) for peer in others]
        frames = {peer: torch.empty(_FRAME_BYTES, dtype=torch.uint8) for peer in others}
        wait_all([self.links.receive(frames[peer], peer) for peer in others])
        rests = {peer: torch.empty(_missing(frames[peer]), dtype=torch.uint8) for peer in others}
        wait_all([self.links.receive(tail, peer) for peer, tail in rests.items() if tail.numel()])
        wait_all(sent)
        return [
            message if peer == self.rank else _unpacked(frames[peer], rests[peer])
            for peer in range(self.size)
        ]


def _packed(message: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a message as its first frame and the rest."""
    packed = _LENGTH.pack(len(message)) + message
    return _bytes(packed[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")), _bytes(packed[_FRAME_BYTES:])


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)


def _length(frame: torch.Tensor) -> int:
    length: int = _LENGTH.unpack_from(frame.numpy().data)[0]
    return length


def _missing(frame: torch.Tensor) -> int:
    return max(0, _LENGTH.size + _length(frame) - _FRAME_BYTES)


def _unpacked(frame: torch.Tensor, rest: torch.Tensor) -> bytes:
    whole = frame.numpy().tobytes() + rest.numpy().tobytes()
    return whole[_LENGTH.size : _LENGTH.size + _length(frame)]
