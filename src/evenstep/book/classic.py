"""The classic ways to sum a tensor over processes, for study and for who doesn't need the promise.

Each sums in an order of its own that depends on the number of processes, so each rounds in its own
way; the trainer uses none of them (see `canonical`). Costs are the seconds until the last process
is done, in the model of Hockney (1994): a message takes α + β bytes; with p processes and n bytes;
additions are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.collectives import Transport, chunk_bounds, wait_all


def sum_at_root(links: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: all send theirs to process 0, which sends the sum back.

    2 (p − 1) (α + n β): every byte goes through process 0 ("Training on Multiple GPUs" of Dive
    into Deep Learning does it so).
    """
    others = range(1, links.size)
    if links.rank == 0:
        for peer in others:
            tensor += _received(links, tensor, peer)
        wait_all([links.send(tensor, peer) for peer in others])
    else:
        links.send(tensor, 0).wait()
        links.receive(tensor, 0).wait()


def sum_by_tree(links: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: up a binomial tree to process 0 and down again.

    2 ⌈log₂ p⌉ (α + n β): few messages one after the other, good for small tensors (Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
    """
    span = 1
    while span < links.size and not links.rank & span:
        if links.rank + span < links.size:
            tensor += _received(links, tensor, links.rank + span)
        span *= 2
    if links.rank:
        links.send(tensor, links.rank - span).wait()
        links.receive(tensor, links.rank - span).wait()
    below = []
    while span > 1:
        span //= 2
        if links.rank + span < links.size:
            below.append(links.send(tensor, links.rank + span))
    wait_all(below)


def sum_around_ring(links: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: chunks go around a ring, growing, then around again, complete.

    2 (p − 1) α + 2 (p − 1) / p n β: the fewest bytes there can be (Patarasuk and Yuan, "Bandwidth
    Optimal All-reduce Algorithms for Clusters of Workstations", 2009).
    """
    chunks = [tensor[lo:hi] for lo, hi in chunk_bounds(len(tensor), links.size)]
    right, left = (links.rank + 1) % links.size, (links.rank - 1) % links.size
    for step in range(links.size - 1):
        sent = links.send(chunks[(links.rank - step) % links.size], right)
        growing = chunks[(links.rank - step - 1) % links.size]
        growing += _received(links, growing, left)
        sent.wait()
    for step in range(links.size - 1):
        sent = links.send(chunks[(links.rank + 1 - step) % links.size], right)
        links.receive(chunks[(links.rank - step) % links.size], left).wait()
        sent.wait()


def sum_sharded(links: Transport, tensor: torch.Tensor) -> None:
    """Sum `tensor` in place: each chunk goes to the process that owns it, and its sum to all.

    2 (p − 1) α + 2 (p − 1) / p n β: a parameter server whose shards are the workers themselves (Li
    et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014; "Parameter
    Servers" of Dive into Deep Learning).
    """
    chunks = [tensor[lo:hi] for lo, hi in chunk_bounds(len(tensor), links.size)]
    mine, others = chunks[links.rank], [peer for peer in range(links.size) if peer != links.rank]
    sent = [links.send(chunks[peer], peer) for peer in others]
    parts = {peer: torch.empty_like(mine) for peer in others}
    wait_all([links.receive(part, peer) for peer, part in parts.items()])
    wait_all(sent)
    for peer in others:
        mine += parts[peer]
    sent = [links.send(mine, peer) for peer in others]
    wait_all([links.receive(chunks[peer], peer) for peer in others])
    wait_all(sent)


CLASSIC: dict[str, Callable[[Transport, torch.Tensor], None]] = {
    "root": sum_at_root,
    "tree": sum_by_tree,
    "ring": sum_around_ring,
    "sharded": sum_sharded,
}
"""Each takes the links and a contiguous tensor (n,), the same size everywhere."""


def _received(links: Transport, like: torch.Tensor, source: int) -> torch.Tensor:
    part = torch.empty_like(like)
    links.receive(part, source).wait()
    return part
