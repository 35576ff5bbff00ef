"""float32 arithmetic by integers and fractions: a reference that shares no code with C or torch."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import torch

_DIGITS = 24  # of a float32's significand
_LOWEST = -149  # the exponent of the smallest denormal


def rounded(exact: Fraction) -> float:
    """Return the float32 nearest to a number, of two the even one; inf from 2¹²⁸ − 2¹⁰³ on."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length() - _DIGITS
    if size >= Fraction(2) ** (exponent + _DIGITS):
        exponent += 1
    exponent = max(exponent, _LOWEST)
    whole = size / Fraction(2) ** exponent
    digits = round(whole)  # to even, exactly
    value = math.ldexp(digits, exponent) if digits.bit_length() + exponent <= 128 else math.inf
    return math.copysign(value, exact)


def fma(a: float, b: float, c: float) -> float:
    """Return the float32 a · b + c, rounded once; zeros, infinities and NaN as in IEEE-754."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c if not math.isfinite(a * b) else c  # no finite product is inf in double
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # exact in double, with its sign (no product of float32 underflows)
    return rounded(exact)


def bits(value: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two float32 tensors have the same shape and bits, any NaN being like any other."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    both = one.isnan() & other.isnan()
    equal = one.contiguous().view(torch.int32) == other.contiguous().view(torch.int32)
    return bool((both | equal).all())


def odd_values(count: int, seed: int, *, special: bool = True) -> torch.Tensor:
    """Return float32 values of all sizes; `special`: with ±0, denormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    values = patterns.to(torch.int32).view(torch.float32).clone()
    plain = (torch.rand(count, generator=generator) - 0.5) * 4
    values = torch.where(torch.rand(count, generator=generator) < 0.7, plain, values)
    if not special:
        return torch.where(values.isfinite(), values, plain)
    edge = torch.tensor([0.0, -0.0, 1e-45, -1e-40, math.inf, -math.inf, math.nan, 3.4e38, -1.0])
    at = torch.rand(count, generator=generator) < 0.1
    return torch.where(at, edge[torch.randint(len(edge), (count,), generator=generator)], values)


def odd(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return odd values in a shape."""
    return odd_values(math.prod(shape), seed).reshape(shape)
