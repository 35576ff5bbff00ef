"""Values that only their owners have, sent one at a time: no process needs memory for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from evenstep.collectives import wait_all
from evenstep.distributed.process_group import Exchange, Peers
from evenstep.errors import PeerError, text_of


def listed(peers: Peers, read: Callable[[], Any], exchange: Exchange) -> list[Any]:
    """Return what every process lists, by rank; each must call this.

    A list is a value that JSON can hold. Where `read` raises an error in one process, no process
    goes on to wait for that one's values.

    Raises:
        PeerError: another process has failed, or is lost.
    """
    failure: Exception | None = None
    try:
        message = {"listed": read()}
    except Exception as error:
        failure, message = error, {"failure": f"{type(error).__name__}: {text_of(error)}"}
    answers = [json.loads(one) for one in peers.gather(json.dumps(message).encode(), exchange)]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "failure" in answer:
            raise peers.failed(rank, answer["failure"])
    return [answer["listed"] for answer in answers]


def streamed(
    peers: Peers,
    order: Iterable[tuple[int, int]],
    own: Iterator[torch.Tensor],
    readers: Sequence[int],
    exchange: Exchange,
) -> Iterator[torch.Tensor | None]:
    """Yield tensors of all processes in an order; each process must iterate over all of it.

    Args:
        peers: the processes.
        order: the owner of each tensor and its size in bytes, the same everywhere.
        own: this process's tensors in that order, each uint8 (bytes,), contiguous on the CPU.
        readers: the ranks that get the tensors; the others get None in their place.
        exchange: what the tensors are for, for error messages.

    Raises:
        PeerError: a process is lost.
    """
    transport, rank = peers.transport, peers.rank
    try:
        for owner, nbytes in order:
            value: torch.Tensor | None = None
            if owner == rank:
                value = next(own)
                if nbytes:
                    wait_all([transport.send(value, one) for one in readers if one != rank])
            elif rank in readers:
                value = torch.empty(nbytes, dtype=torch.uint8)
                if nbytes:
                    transport.receive(value, owner).wait()
            yield value if rank in readers else None
    except PeerError as error:
        raise peers.explained(error, exchange) from None
