"""Differentiable all-reduce and all-gather over processes.

The loss is the sum of the losses of all processes, so the gradient of a process's input sums over
what every process computed from it. All processes must make the calls in the same order, and also
run the backward passes in the same order.
"""

from __future__ import annotations

from typing import Any

import torch

from evenstep.collectives import Transport, canonical_sum, forest, wait_all


def all_reduce(tensor: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return the sum over the processes of `tensor`, of equal shape, in the canonical order."""
    result: torch.Tensor = _AllReduce.apply(tensor, transport)  # type: ignore[no-untyped-call]
    return result


def all_gather(tensor: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return the tensors (*shape) of all processes, stacked by rank: (size, *shape)."""
    result: torch.Tensor = _AllGather.apply(tensor, transport)  # type: ignore[no-untyped-call]
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, transport: Transport) -> torch.Tensor:
        ctx.transport = transport
        return _summed(tensor, transport)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.transport), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, transport: Transport) -> torch.Tensor:
        ctx.transport = transport
        rows = tensor.new_empty((transport.size, *tensor.shape))
        rows[transport.rank] = tensor
        others = [peer for peer in range(transport.size) if peer != transport.rank]
        transfers = [transport.send(rows[transport.rank], peer) for peer in others]
        transfers += [transport.receive(rows[peer], peer) for peer in others]
        wait_all(transfers)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.transport)[ctx.transport.rank], None


def _summed(tensor: torch.Tensor, transport: Transport) -> torch.Tensor:
    one_each = forest(
        transport.size, transport.size, tuple(range(r, r + 1) for r in range(transport.size))
    )
    own = tensor.contiguous().flatten()
    total = torch.empty_like(own)
    canonical_sum(transport, one_each, [own], total)
    return total.view(tensor.shape)
