"""Maxima and shrinkages, by comparisons.

Torch's own kernels treat zeros of different signs, and gradients that are NaN, differently in the
body and in the tail of a loop over vectors, whose width differs between processors, and in parts
of a tensor that different threads compare.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from evenstep.arithmetic.arrays import Scalar
from evenstep.arithmetic.operations import kernel, operation


@kernel("maximum", "max.other", "clamp_min.Tensor")
def maximum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a where a > b or a is NaN, else b."""
    return torch.where((a > b) | (a != a), a, b)


@kernel("minimum", "min.other", "clamp_max.Tensor")
def minimum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a where a < b or a is NaN, else b."""
    return torch.where((a < b) | (a != a), a, b)


@kernel("clamp.Tensor")
def clamp(
    x: torch.Tensor, low: torch.Tensor | None = None, high: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the minimum of `high` and the maximum of x and `low`."""
    if low is not None:
        x = maximum(x, low)
    return x if high is None else minimum(x, high)


@kernel("hardtanh_backward")
def hardtanh_backward(
    grad: torch.Tensor, x: torch.Tensor, min_val: Scalar, max_val: Scalar
) -> torch.Tensor:
    """Return 0 where x ≤ min_val or x ≥ max_val, else grad."""
    return grad.masked_fill((x <= min_val) | (x >= max_val), 0.0)


@kernel("hardshrink_backward", "softshrink_backward")
def shrink_backward(grad: torch.Tensor, x: torch.Tensor, lambd: Scalar) -> torch.Tensor:
    """Return 0 where −lambd ≤ x ≤ lambd, else grad."""
    return grad.masked_fill((x >= -lambd) & (x <= lambd), 0.0)


@kernel("softshrink")
def softshrink(x: torch.Tensor, lambd: Scalar = 0.5) -> torch.Tensor:
    """Return x − lambd where x > lambd, x + lambd where x < −lambd, else x · 0."""
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0.0))


def _extreme(run: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the largest or smallest number, or both; a zero is +0."""
    found = run(x, *args, **kwargs)
    for one in (found,) if isinstance(found, torch.Tensor) else found:
        if one.is_floating_point():
            one.add_(0.0)
    return found


for _name in ("max", "min", "amax", "amin", "aminmax"):
    kernel(_name)(functools.partial(_extreme, operation(_name)))
