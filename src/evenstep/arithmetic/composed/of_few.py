"""Operations that are made of a few others."""

from __future__ import annotations

import math
from typing import Any

import torch

from evenstep.arithmetic.operations import composed


@composed("_safe_softmax")
def safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the softmax, with 0 where all scores of a row are −inf."""
    if dtype is not None:
        scores = scores.to(dtype)
    weights = torch.softmax(scores, dim)
    nothing = (scores == -math.inf).all(dim, keepdim=True)
    return weights.masked_fill_(nothing, 0.0)


@composed("lerp.Tensor")
def lerp(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the number between a and b at `weight`, computed from the nearer end."""
    difference = b - a
    from_a = torch.addcmul(a, weight, difference)
    from_b = torch.addcmul(b, weight - 1, difference)
    return torch.where(weight < 0.5, from_a, from_b)


@composed("_cdist_forward")
def distances(x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    """Return the Euclidean distances (..., n, m) of points (..., n, width) and (..., m, width)."""
    if p != 2:
        return NotImplemented
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    return torch.linalg.vector_norm(difference, dim=-1)


@composed("_cdist_backward")
def distances_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, p: float, cdist: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of `x`: 0 where two points are one."""
    shares = (grad / cdist).masked_fill(cdist == 0, 0.0)
    difference = x.unsqueeze(-2) - y.unsqueeze(-3)
    return (shares.unsqueeze(-1) * difference).sum(-2)


@composed("batch_norm_update_stats")
def batch_statistics(
    x: torch.Tensor, running_mean: Any, running_var: Any, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and biased variance of each channel."""
    if running_mean is not None or running_var is not None:
        return NotImplemented
    dims = [0, *range(2, x.ndim)]
    variance, mean = torch.var_mean(x, dims, correction=0)
    return mean, variance
