"""How far float32 values lie from exact ones, in units in the last place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import mpmath
import torch

from exact_floats import odd_values

_LARGEST = mpmath.mpf(2) ** 128 - mpmath.mpf(2) ** 103  # from here on, values round to infinity


def values(count: int, *near: float) -> torch.Tensor:
    """Return float32 values of all sizes, in even steps of their bits, and near points; never 0."""
    steps = torch.arange(-(2**31), 2**31, 2**32 // count)
    parts = [odd_values(count, 0, special=False), steps.to(torch.int32).view(torch.float32)]
    parts += [(torch.rand(count, generator=torch.Generator().manual_seed(1)) - 0.5) * 240]
    for point in near:
        bits = torch.tensor(point).view(torch.int32)
        parts.append((bits + torch.arange(-40, 41, dtype=torch.int32)).view(torch.float32))
    joined = torch.cat(parts)
    return joined[joined.isfinite() & (joined != 0)]


def exact(function: Callable[..., object], *args: torch.Tensor) -> list[mpmath.mpf]:
    """Return a function's values by mpmath; NaN where it is not real."""
    found = []
    with mpmath.workprec(100):
        for given in zip(*(one.tolist() for one in args), strict=True):
            try:
                value = function(*map(mpmath.mpf, given))
            except (ValueError, ZeroDivisionError):
                value = mpmath.nan
            found.append(mpmath.nan if isinstance(value, mpmath.mpc) else mpmath.mpf(value))
    return found


def worst(results: torch.Tensor, expected: Iterable[mpmath.mpf]) -> float:
    """Return the largest error of the results; infinite if one that must be NaN is not."""
    pairs = zip(results.flatten().tolist(), expected, strict=True)
    return max((error(*pair) for pair in pairs), default=0.0)


def error(result: float, expected: mpmath.mpf) -> float:
    """Return the error of one float32 in units of the last place of the exact value."""
    if mpmath.isnan(expected) or math.isnan(result):
        return 0.0 if mpmath.isnan(expected) and math.isnan(result) else math.inf
    if abs(expected) >= _LARGEST or math.isinf(result):
        is_close = abs(expected) > _LARGEST * (1 - mpmath.mpf(2) ** -24)
        return 0.0 if is_close and (result > 0) == (expected > 0) else math.inf
    exponent = max(math.frexp(float(expected))[1], -125) - 24 if expected else -149
    with mpmath.workprec(100):
        return float(abs(mpmath.mpf(result) - expected) * mpmath.mpf(2) ** -exponent)
