"""What an exchange between processes needs: to send tensors to each other, and to wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import torch


class Transfer(Protocol):
    """A tensor on its way."""

    def wait(self) -> None:
        """Block until it has left (or arrived), at most for the links' time limit.

        Raises:
            PeerError: the time is over, or the other process is gone.
        """
        ...


class Links(Protocol):
    """The processes of a group and the way from this one to each other one.

    Tensors of one tag between two processes arrive in the order in which they are sent. They are
    contiguous, in the CPU's memory, and left alone until their transfer is waited for. Any thread
    may send and receive.

    Attributes:
        rank: this process among them.
        size: how many there are.
    """

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Begin to send `tensor`."""
        ...

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transfer:
        """Begin to receive into `tensor` what `source` sends with that tag, of the same size."""
        ...

    def close(self) -> None:
        """Close every way; who waits for this process learns that it is gone."""
        ...


def wait_all(transfers: Iterable[Transfer]) -> None:
    """Wait for every transfer."""
    for transfer in transfers:
        transfer.wait()


def chunk_bounds(elements: int, owners: int) -> list[tuple[int, int]]:
    """Return the [lo, hi) of a flat tensor that each of `owners` processes adds up."""
    cuts = [elements * owner // owners for owner in range(owners + 1)]
    return list(itertools.pairwise(cuts))
