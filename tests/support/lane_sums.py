"""Sums in the order of portable arithmetic, by single additions of torch in float64."""

from __future__ import annotations

import random

import torch

from exact_floats import odd_values

LANES = 16


def lane_sum(terms: torch.Tensor) -> torch.Tensor:
    """Return the sums over the first dimension: term i to lane i mod 16, lanes added by halves."""
    lanes = torch.zeros(LANES, *terms.shape[1:], dtype=torch.float64)
    for start in range(0, len(terms), LANES):
        block = terms[start : start + LANES].double()
        lanes[: len(block)] += block
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def terms_of(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Return a tensor with its reduced dimensions as the first, in row-major order."""
    kept = [dim for dim in range(x.ndim) if dim not in dims]
    return x.permute(*sorted(dims), *kept).flatten(0, len(dims) - 1)


def cancelling(count: int, seed: int) -> torch.Tensor:
    """Return float32 values of which some are ±2⁵⁴, the others small.

    Where those cancel, a sum in double is what their rounding errors leave of the small ones: a
    different order gives a different result, even in float32.
    """
    generator = torch.Generator().manual_seed(seed)
    small = torch.randn(count, generator=generator)
    small *= 2.0 ** torch.randint(0, 7, (count,), generator=generator)
    is_large = torch.rand(count, generator=generator) < 0.4
    return torch.where(is_large, small.sign() * 2.0**54, small)


def any_layout(shape: list[int], rng: random.Random, *, special: bool = True) -> torch.Tensor:
    """Return float32 values whose memory is contiguous, transposed, sliced or expanded.

    `special`: values are those of `odd_values`, else they cancel each other.
    """
    kind = rng.choice(["plain", "transposed", "sliced", "expanded", "channels last"])
    inner = list(shape)
    order = rng.sample(range(len(shape)), len(shape))
    at = rng.randrange(len(shape)) if shape else 0
    if kind == "channels last":
        order = [0, *range(2, len(shape)), 1] if len(shape) > 1 else order
    if kind in ("transposed", "channels last"):
        inner = [shape[dim] for dim in order]
    if shape and kind == "sliced":
        inner[at] = 2 * inner[at] + 1
    if shape and kind == "expanded":
        inner[at] = 1
    count = torch.Size(inner).numel()
    values = odd_values if special else cancelling
    x = values(count, rng.randrange(2**31)).view(inner)
    if kind in ("transposed", "channels last"):
        return x.permute(sorted(range(len(shape)), key=order.__getitem__))
    if shape and kind == "sliced":
        return x.narrow(at, 1, 2 * shape[at]).unflatten(at, (shape[at], 2)).select(at + 1, 0)
    return x.expand(shape)
