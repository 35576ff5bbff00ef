"""The classic all-reduce algorithms, for study and for programs that need no reproducible sums.

Each sums in an order that depends on the number of processes, so their results round differently;
the trainer uses none of them (see `collectives/canonical.py`). Costs are the seconds until the last
process is done, for p processes and n bytes, in the model of Hockney (1994): a message of m bytes
takes α + m β. Additions are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.collectives import Transport, even_bounds, wait_all


def sum_at_root(transport: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: all processes send theirs to process 0, which sends the sum back.

    Cost 2 (p − 1) (α + n β): every byte goes through process 0. "Training on Multiple GPUs" of Dive
    into Deep Learning uses it.
    """
    others = range(1, transport.size)
    if transport.rank == 0:
        for peer in others:
            tensor += _received(transport, tensor, peer)
        wait_all([transport.send(tensor, peer) for peer in others])
    else:
        transport.send(tensor, 0).wait()
        transport.receive(tensor, 0).wait()


def sum_by_tree(transport: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: up a binomial tree to process 0 and down again.

    Cost 2 ⌈log₂ p⌉ (α + n β): few messages in sequence, good for small tensors (Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
    """
    span = 1
    while span < transport.size and not transport.rank & span:
        if transport.rank + span < transport.size:
            tensor += _received(transport, tensor, transport.rank + span)
        span *= 2
    if transport.rank:
        transport.send(tensor, transport.rank - span).wait()
        transport.receive(tensor, transport.rank - span).wait()
    below = []
    while span > 1:
        span //= 2
        if transport.rank + span < transport.size:
            below.append(transport.send(tensor, transport.rank + span))
    wait_all(below)


def sum_around_ring(transport: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: partial sums of chunks go around a ring, then the complete chunks do.

    Cost 2 (p − 1) α + 2 (p − 1) / p n β: the fewest bytes possible (Patarasuk and Yuan, "Bandwidth
    Optimal All-reduce Algorithms for Clusters of Workstations", 2009).
    """
    chunks = [tensor[lo:hi] for lo, hi in even_bounds(len(tensor), transport.size)]
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for step in range(transport.size - 1):
        sent = transport.send(chunks[(transport.rank - step) % transport.size], right)
        growing = chunks[(transport.rank - step - 1) % transport.size]
        growing += _received(transport, growing, left)
        sent.wait()
    for step in range(transport.size - 1):
        sent = transport.send(chunks[(transport.rank + 1 - step) % transport.size], right)
        transport.receive(chunks[(transport.rank - step) % transport.size], left).wait()
        sent.wait()


def sum_sharded(transport: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: each chunk goes to the process that owns it, and its sum to all.

    Cost 2 (p − 1) α + 2 (p − 1) / p n β: a parameter server whose shards are the workers (Li
    et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014; "Parameter
    Servers" of Dive into Deep Learning).
    """
    chunks = [tensor[lo:hi] for lo, hi in even_bounds(len(tensor), transport.size)]
    mine, others = (
        chunks[transport.rank],
        [peer for peer in range(transport.size) if peer != transport.rank],
    )
    sent = [transport.send(chunks[peer], peer) for peer in others]
    parts = {peer: torch.empty_like(mine) for peer in others}
    wait_all([transport.receive(part, peer) for peer, part in parts.items()])
    wait_all(sent)
    for peer in others:
        mine += parts[peer]
    sent = [transport.send(mine, peer) for peer in others]
    wait_all([transport.receive(chunks[peer], peer) for peer in others])
    wait_all(sent)


CLASSIC: dict[str, Callable[[Transport, torch.Tensor], None]] = {
    "root": sum_at_root,
    "tree": sum_by_tree,
    "ring": sum_around_ring,
    "sharded": sum_sharded,
}
"""Each takes the transport and a contiguous tensor (n,), of the same size in every process."""


def _received(transport: Transport, like: torch.Tensor, source: int) -> torch.Tensor:
    part = torch.empty_like(like)
    transport.receive(part, source).wait()
    return part
