"""Chains of fused multiply-adds, one element at a time: a reference for products."""

import random

import torch

from exact_floats import fma


def chain(pairs, total=0.0):
    """Return the float32 that fma(a, b, total) makes of pairs (a, b), one after the other."""
    for a, b in pairs:
        total = fma(a, b, total)
    return total


def float32(value):
    """Return a number rounded to float32."""
    return float(torch.tensor(value, dtype=torch.float32))


def laid_out(values, kind):
    """Return a tensor of the same values with other strides."""
    if kind == "transposed":
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "sliced":
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    if kind == "in a row":  # rows lie apart
        wide = torch.full((*values.shape[:-1], values.shape[-1] + 3), torch.nan)
        wide[..., 2:-1] = values
        return wide[..., 2:-1]
    return values


LAYOUTS = ("contiguous", "transposed", "sliced", "in a row")


def some_places(shape, count, seed):
    """Return up to `count` indices of a tensor: all corners' neighbours are likely among them."""
    picked = random.Random(seed)
    places = {tuple(size - 1 for size in shape), tuple(0 for _ in shape)}
    for _ in range(count):
        places.add(tuple(picked.choice([picked.randrange(size), size - 1, 0]) for size in shape))
    return sorted(places)
