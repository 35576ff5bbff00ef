"""Evenly spaced numbers, computed in float64 and rounded to the dtype asked for."""

from __future__ import annotations

import math
from typing import Any

import torch

from evenstep.arithmetic.operations import kernel

aten = torch.ops.aten

Scalar = int | float | bool


@kernel("arange.start_step")
def arange(
    start: Scalar, end: Scalar, step: Scalar = 1, *, dtype: torch.dtype | None = None, **where: Any
) -> torch.Tensor:
    """Return start + i · step below `end`: product and sum are rounded to float64 each."""
    of_integers = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    if of_integers or all(isinstance(value, int) for value in (start, end, step)):
        return aten.arange.start_step(start, end, step, dtype=dtype, **where)
    places = _places(math.ceil((end - start) / step), where)
    return places.mul_(step).add_(start).to(dtype or torch.get_default_dtype())


@kernel("arange")
def arange_to(end: Scalar, **options: Any) -> torch.Tensor:
    """Return the numbers from 0 below `end`."""
    return arange(0, end, 1, **options)


@kernel("arange.start")
def arange_between(start: Scalar, end: Scalar, **options: Any) -> torch.Tensor:
    """Return start, start + 1, ... below `end`."""
    return arange(start, end, 1, **options)


@kernel("linspace")
def linspace(
    start: Scalar, end: Scalar, steps: int, *, dtype: torch.dtype | None = None, **where: Any
) -> torch.Tensor:
    """Return `steps` numbers from `start` to `end`: each is computed from the nearer end."""
    step = (end - start) / (steps - 1) if steps > 1 else 0.0
    places = _places(steps, where)
    from_start = (places * step).add_(start)
    from_end = ((places - (steps - 1)) * step).add_(end)
    numbers = torch.where(places < steps / 2, from_start, from_end)
    return numbers.to(dtype or torch.get_default_dtype())


def _places(count: int, where: dict[str, Any]) -> torch.Tensor:
    """Return 0, 1, 2, ... in float64."""
    return torch.arange(count, dtype=torch.int64, **where).to(torch.float64)
