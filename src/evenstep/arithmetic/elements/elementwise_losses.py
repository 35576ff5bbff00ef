"""Losses that compare each element with its target, and their gradients.

The losses of the elements are computed here. Their mean or sum is that of `torch.mean` or
`torch.sum`. `c/elementwise.c` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.arithmetic.elements.elementwise import REFUSED, apply, of_two
from evenstep.arithmetic.half_precision import HALF_PRECISION
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import composed, kernel
from evenstep.errors import ModelError

MEAN, SUM = 1, 2  # torch's numbers of reductions; 0 is none

_smooth_l1 = Function("smooth_l1", "lpdp")
_huber = Function("huber", "lpdp")
_cross_entropy = Function("binary_cross_entropy", "lppp")
_of_logits = Function("binary_cross_entropy_of_logits", "lppp")
_of_weighted_logits = Function("cross_entropy_weighted", "lpppp")
_soft_margin = Function("binary_soft_margin", "lppp")
_cross_entropy_slope = of_two("cross_entropy_slope")
_soft_margin_slope = of_two("soft_margin_slope")


def _losses(
    run: Callable[..., None], tensors: tuple[torch.Tensor, ...], *numbers: float
) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype in HALF_PRECISION:
        return _losses(run, tuple(one.float() for one in tensors), *numbers).to(dtype)
    result = apply(run, tensors, *numbers)
    if result is REFUSED:
        dtypes = " and ".join(sorted({str(one.dtype) for one in tensors}))
        raise ModelError(f"a loss of {dtypes} is not portable: give it torch.float32")
    return result


def _reduced(losses: torch.Tensor, weight: torch.Tensor | None, reduction: int) -> torch.Tensor:
    if weight is not None:
        losses = losses * weight
    if reduction == MEAN:
        return losses.mean()
    return losses.sum() if reduction == SUM else losses


def _times(
    slope: torch.Tensor,
    weight: torch.Tensor | None,
    gradient: torch.Tensor,
    reduction: int,
) -> torch.Tensor:
    """Return slope · weight · (the gradient of each element's loss)."""
    if slope is REFUSED:
        return slope
    if weight is not None:
        slope = slope * weight
    return slope * (gradient / slope.numel() if reduction == MEAN else gradient)


@composed("mse_loss")
def mse_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """Return (x − y)², then its mean or sum."""
    difference = x - y
    return _reduced(difference * difference, None, reduction)


@kernel("mse_loss_backward")
def mse_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int
) -> torch.Tensor:
    """Return 2 (x − y) · gradient, the gradient divided by the number of elements first."""
    difference = x - y
    return _times(difference + difference, None, gradient, reduction)


@composed("smooth_l1_loss")
def smooth_l1_loss(
    x: torch.Tensor, y: torch.Tensor, reduction: int = MEAN, beta: float = 1.0
) -> torch.Tensor:
    """Return z² / (2 beta) where z = |x − y| is below beta, else z − beta / 2."""
    return _reduced(_losses(_smooth_l1, (x - y,), beta), None, reduction)


@kernel("smooth_l1_loss_backward")
def smooth_l1_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """Return (x − y) / beta, at most 1 in magnitude, times the gradient."""
    return _times(((x - y) / beta).clamp(-1, 1), None, gradient, reduction)


@composed("huber_loss")
def huber_loss(
    x: torch.Tensor, y: torch.Tensor, reduction: int = MEAN, delta: float = 1.0
) -> torch.Tensor:
    """Return z² / 2 where z = |x − y| is at most delta, else delta (z − delta / 2)."""
    return _reduced(_losses(_huber, (x - y,), delta), None, reduction)


@kernel("huber_loss_backward")
def huber_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int, delta: float
) -> torch.Tensor:
    """Return x − y, at most delta in magnitude, times the gradient."""
    return _times((x - y).clamp(-delta, delta), None, gradient, reduction)


@composed("binary_cross_entropy")
def binary_cross_entropy(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN
) -> torch.Tensor:
    """Return −(y ln x + (1 − y) ln(1 − x)), each logarithm at least −100.

    A probability x outside of 0 to 1, for which torch raises an error, gives NaN.
    """
    return _reduced(_losses(_cross_entropy, (x, y)), weight, reduction)


@kernel("binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
) -> torch.Tensor:
    """Return (x − y) / (x (1 − x)), the divisor at least 10⁻¹², times the gradient."""
    return _times(_cross_entropy_slope(x, y), weight, gradient, reduction)


@composed("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: int = MEAN,
) -> torch.Tensor:
    """Return (1 − y) x + ((pos_weight − 1) y + 1) ln(1 + exp(−x))."""
    if pos_weight is None:
        losses = _losses(_of_logits, (x, y))
    else:
        losses = _losses(_of_weighted_logits, (x, y, pos_weight))
    return _reduced(losses, weight, reduction)


@composed("soft_margin_loss")
def soft_margin_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """Return ln(1 + exp(−x y))."""
    return _reduced(_losses(_soft_margin, (x, y)), None, reduction)


@kernel("soft_margin_loss_backward")
def soft_margin_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reduction: int
) -> torch.Tensor:
    """Return −y / (1 + exp(x y)) · gradient."""
    return _times(_soft_margin_slope(x, y), None, gradient, reduction)
