"""Sums and gatherings over processes that gradients flow through.

The loss is understood as the sum of all processes' losses: the gradient of what a process gave is
the sum of what every process did with it. Every process calls them in the same order, and runs the
backward passes in the same order too.
"""

from __future__ import annotations

from typing import Any

import torch

from evenstep.collectives import Transport, canonical_sum, forest, wait_all


def all_reduce(tensor: torch.Tensor, links: Transport) -> torch.Tensor:
    """Return the sum of every process's `tensor`, of one shape, in the order of the tree."""
    result: torch.Tensor = _AllReduce.apply(tensor, links)  # type: ignore[no-untyped-call]
    return result


def all_gather(tensor: torch.Tensor, links: Transport) -> torch.Tensor:
    """Return every process's `tensor` (shape), stacked by rank: (size, *shape)."""
    result: torch.Tensor = _AllGather.apply(tensor, links)  # type: ignore[no-untyped-call]
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, links: Transport) -> torch.Tensor:
        ctx.links = links
        return _summed(tensor, links)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.links), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, links: Transport) -> torch.Tensor:
        ctx.links = links
        rows = tensor.new_empty((links.size, *tensor.shape))
        rows[links.rank] = tensor
        others = [peer for peer in range(links.size) if peer != links.rank]
        transfers = [links.send(rows[links.rank], peer) for peer in others]
        transfers += [links.receive(rows[peer], peer) for peer in others]
        wait_all(transfers)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.links)[ctx.links.rank], None


def _summed(tensor: torch.Tensor, links: Transport) -> torch.Tensor:
    one_each = forest(links.size, links.size, tuple(range(r, r + 1) for r in range(links.size)))
    own = tensor.contiguous().flatten()
    total = torch.empty_like(own)
    canonical_sum(links, one_each, [own], total)
    return total.view(tensor.shape)
