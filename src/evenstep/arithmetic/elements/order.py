"""Sorting and ranks, where equal numbers keep their order."""

from __future__ import annotations

import torch

from evenstep.arithmetic.operations import kernel

aten = torch.ops.aten


@kernel("sort")
def sort(
    values: torch.Tensor, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort; equal numbers keep their order."""
    return aten.sort.stable(values, stable=True, dim=dim, descending=descending)


@kernel("topk")
def topk(
    values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, in_order: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first numbers in order; of equal numbers, the first ones."""
    if values.ndim == 0:
        return values.clone(), torch.zeros((), dtype=torch.int64)
    if not 0 <= k <= values.shape[dim]:
        raise RuntimeError(f"topk: k={k} is out of range for dimension of {values.shape[dim]}")
    ranked, places = sort(values, dim, largest)
    return ranked.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


@kernel("median.dim")
def median(
    values: torch.Tensor, dim: int, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower median, the first of equal ones; the first NaN where there is one."""
    odd = values.isnan()
    place = torch.full((), max(values.shape[dim] - 1, 0) // 2 if values.ndim else 0)
    first_odd = values.shape[dim] - odd.sum(dim, keepdim=True) if values.ndim else 0
    return _ranked(values, dim, keepdim, torch.where(odd.any(dim, keepdim=True), first_odd, place))


@kernel("nanmedian.dim")
def nanmedian(
    values: torch.Tensor, dim: int, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower median of what is not NaN, the first of equal ones."""
    known = values.isnan().logical_not_().sum(dim, keepdim=True)
    return _ranked(values, dim, keepdim, (known - 1).clamp_(min=0) // 2)


def _ranked(
    values: torch.Tensor, dim: int, keepdim: bool, rank: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of a rank, and its place."""
    if values.ndim == 0:
        return values.clone(), torch.zeros((), dtype=torch.int64)
    ranked, places = sort(values, dim)
    found = ranked.gather(dim, rank), places.gather(dim, rank)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))
