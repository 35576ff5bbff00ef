"""Sums of scaled tensors, rounded once: what optimizers are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenstep.arithmetic.arrays import Scalar, addresses, aligned, is_float32, written
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import kernel

aten = torch.ops.aten

_add_scaled = Function("add_scaled", "lpfpp")
_add_product = Function("add_product", "lpfppp")
_add_quotient = Function("add_quotient", "lpfppp")
_interpolate = Function("interpolate", "lppfp")


@kernel("add.Tensor", "add.Scalar")
def add(a: torch.Tensor | Scalar, b: torch.Tensor | Scalar, alpha: Scalar = 1) -> torch.Tensor:
    """Return a + alpha · b, where alpha is not 1 by one fused multiply-add."""
    if alpha == 1:
        return aten.add.Tensor(a, b)
    if alpha == -1:
        return aten.sub.Tensor(a, b)
    if not is_float32(a, b):
        return NotImplemented
    a, b = (
        one if isinstance(one, torch.Tensor) else torch.full((), one, dtype=torch.float32)
        for one in (a, b)
    )
    return _combine(_add_scaled, (a,), alpha, (b,))


@kernel("add_.Tensor")
def add_(a: torch.Tensor, b: torch.Tensor | Scalar, *, alpha: Scalar = 1) -> torch.Tensor:
    """Add alpha · b to `a` in place."""
    return aten.add_.Tensor(a, b) if alpha == 1 else _written(a, add(a, b, alpha=alpha))


@kernel("sub.Tensor", "sub.Scalar")
def sub(a: torch.Tensor, b: torch.Tensor | Scalar, alpha: Scalar = 1) -> torch.Tensor:
    """Return a − alpha · b."""
    return aten.sub.Tensor(a, b) if alpha == 1 else add(a, b, alpha=-alpha)


@kernel("sub_.Tensor")
def sub_(a: torch.Tensor, b: torch.Tensor | Scalar, *, alpha: Scalar = 1) -> torch.Tensor:
    """Subtract alpha · b from `a` in place."""
    return aten.sub_.Tensor(a, b) if alpha == 1 else _written(a, add(a, b, alpha=-alpha))


@kernel("rsub.Scalar", "rsub.Tensor")
def rsub(a: torch.Tensor, b: torch.Tensor | Scalar, alpha: Scalar = 1) -> torch.Tensor:
    """Return b − alpha · a."""
    if alpha == 1:
        return torch.rsub(a, b)
    if not isinstance(b, torch.Tensor):
        b = torch.full((), b, dtype=torch.result_type(a, b))
    return sub(b, a, alpha=alpha)


@kernel("addcmul")
def addcmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, value: Scalar = 1
) -> torch.Tensor:
    """Return fma(value · b, c, a)."""
    return _combine(_add_product, (a,), value, (b, c)) if is_float32(a, b, c) else NotImplemented


@kernel("addcdiv")
def addcdiv(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, value: Scalar = 1
) -> torch.Tensor:
    """Return fma(value, b / c, a)."""
    return _combine(_add_quotient, (a,), value, (b, c)) if is_float32(a, b, c) else NotImplemented


@kernel("lerp.Scalar")
def lerp(a: torch.Tensor, b: torch.Tensor, weight: Scalar) -> torch.Tensor:
    """Return the number between a and b at `weight`, computed from the nearer end."""
    return _combine(_interpolate, (a, b), weight, ()) if is_float32(a, b) else NotImplemented


def _combine(
    run: Callable[..., None],
    before: tuple[torch.Tensor, ...],
    scale: Scalar,
    after: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Call a C function of arrays, a scale, and arrays."""
    arrays = aligned(*before, *after)
    out = torch.empty_like(arrays[0])
    pointers = addresses(arrays)
    middle = len(before)
    run(out.numel(), *pointers[:middle], scale, *pointers[middle:], out.data_ptr())
    return out


def _written(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value if value is NotImplemented else written(target, value)
