"""Remainders, quotients rounded down, and rounding to decimals."""

from __future__ import annotations

from typing import Any

import torch

from evenstep.arithmetic.arrays import Scalar, is_float32
from evenstep.arithmetic.elements.elementwise import apply
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import kernel

aten = torch.ops.aten

_remainder = Function("binary_remainder", "lppp")


@kernel("fmod.Tensor", "fmod.Scalar")
def fmod(a: torch.Tensor, b: torch.Tensor | Scalar) -> torch.Tensor:
    """Return a − b · trunc(a / b), exactly."""
    pair = _float32(a, b)
    if pair is None:
        return NotImplemented
    return apply(_remainder, tuple(pair))


def _float32(*values: Any) -> list[torch.Tensor] | None:
    """Return values as float32 tensors, if torch would compute with that type."""
    if not is_float32(*values):
        return None
    return [
        one if isinstance(one, torch.Tensor) else torch.full((), one, dtype=torch.float32)
        for one in values
    ]


@kernel("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(a: torch.Tensor | Scalar, b: torch.Tensor | Scalar) -> torch.Tensor:
    """Return the remainder of a / b, exactly, plus b, rounded, if their signs differ."""
    pair = _float32(a, b)
    if pair is None:
        return NotImplemented
    rest = fmod(*pair)
    return torch.where((rest != 0) & ((rest < 0) != (pair[1] < 0)), rest + pair[1], rest)


@kernel("div.Tensor_mode", "div.Scalar_mode")
def div(a: torch.Tensor, b: torch.Tensor | Scalar, *, rounding_mode: str | None) -> torch.Tensor:
    """Return a / b, its integer part, or the integer below it.

    The integer below is that nearest to (a − fmod(a, b)) / b, minus 1 if signs differ; 0 has the
    sign of a / b.
    """
    if rounding_mode != "floor":
        return aten.div.Tensor_mode(a, b, rounding_mode=rounding_mode)
    pair = _float32(a, b)
    if pair is None:
        return NotImplemented
    a, b = pair
    rest = fmod(a, b)
    whole = (a - rest) / b
    whole = torch.where((rest != 0) & ((rest < 0) != (b < 0)), whole - 1, whole)
    down = whole.floor()
    down = torch.where(whole - down > 0.5, down + 1, down)
    quotient = a / b
    down = torch.where(whole == 0, torch.zeros_like(down).copysign_(quotient), down)
    return torch.where(b == 0, quotient, down)


@kernel("floor_divide", "floor_divide.Scalar")
def floor_divide(a: torch.Tensor, b: torch.Tensor | Scalar) -> torch.Tensor:
    """Return the integer below a / b."""
    return div(a, b, rounding_mode="floor")


@kernel("round.decimals")
def round_to(a: torch.Tensor, *, decimals: int = 0) -> torch.Tensor:
    """Return the integer nearest to a · 10^decimals, divided by it; each operation rounds."""
    power = 10.0 ** abs(decimals)
    return (a * power).round_() / power if decimals >= 0 else (a / power).round_() * power
