"""The interface of a transport: what a reduction needs to exchange tensors between processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import torch


class Transfer(Protocol):
    """A tensor that is being sent or received."""

    def wait(self) -> None:
        """Block until the tensor was sent or has arrived, at most for the transport's time limit.

        Raises:
            PeerError: the time limit has passed, or the other process has left.
        """
        ...


class Transport(Protocol):
    """Point-to-point messages between this process and the others of a group.

    Tensors with one tag between two processes arrive in the order in which they are sent. They must
    be contiguous, in CPU memory, and unchanged until their transfer was waited for. Any thread may
    send and receive.

    Attributes:
        rank: this process's number in the group.
        size: the number of processes.
    """

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Start sending `tensor`."""
        ...

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Transfer:
        """Start receiving into `tensor`, which has the size of the tensor that `source` sends."""
        ...

    def close(self) -> None:
        """Close all connections; processes that wait for this one get a PeerError."""
        ...


def wait_all(transfers: Iterable[Transfer]) -> None:
    """Wait for every transfer."""
    for transfer in transfers:
        transfer.wait()


def even_bounds(items: int, parts: int) -> list[tuple[int, int]]:
    """Return the [lo, hi) of `parts` parts of some items, as `numpy.array_split` cuts them.

    Their lengths differ by at most one, and the longer ones come first.
    """
    size, longer = divmod(items, parts)
    sizes = [size + 1] * longer + [size] * (parts - longer)
    return [*itertools.pairwise(itertools.accumulate(sizes, initial=0))]
