"""Interpolation: bit for bit loops of fused multiply-adds, near float64's with its gradients."""

import math
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch.nn import functional

from arrangements import arranged
from evenstep.arithmetic.mode import PortableMode
from evenstep.arithmetic.scattered import interpolation
from exact_floats import fma, odd, same


def linear(before, after, corners):
    """Return, exactly, two places and their weights for each number."""
    for place in range(after):
        if corners:
            at = Fraction(place * (before - 1), after - 1) if after > 1 else Fraction(0)
        else:
            at = max(
                Fraction(before, after) * (place + Fraction(1, 2)) - Fraction(1, 2), Fraction(0)
            )
        left = min(math.floor(at), before - 1)
        yield [left, min(left + 1, before - 1)], [1 - (at - left), at - left]


def cubic(before, after, corners):
    """Return, exactly, four places and the weights of cubic convolution with a = −3/4."""
    a = Fraction(-3, 4)
    for place in range(after):
        if corners:
            at = Fraction(place * (before - 1), after - 1) if after > 1 else Fraction(0)
        else:
            at = Fraction(before, after) * (place + Fraction(1, 2)) - Fraction(1, 2)
        left = math.floor(at)
        near = [abs(at - left - shift) for shift in (-1, 0, 1, 2)]
        yield (
            [min(max(left + shift, 0), before - 1) for shift in (-1, 0, 1, 2)],
            [
                (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4)
                for d in near
            ],
        )


SIZES = [(7, 13), (13, 7), (4, 8), (8, 4), (1, 5), (5, 1), (6, 6), (33, 100)]


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("exact", "table"), [(linear, interpolation._linear), (cubic, interpolation._cubic)]
)
def test_tables_are_those_of_fractions(exact, table, sizes, corners):
    """A weight rounds to float32; before, a place below 100 rounds a few times in float64."""
    places, weights = table(*sizes, corners, None)
    for (at, by), found, found_weights in zip(
        exact(*sizes, corners), places.tolist(), weights.tolist(), strict=True
    ):
        if found != at:  # a whole number, rounded to the next: the weights say the same
            assert min(abs(float(one) - round(one)) for one in by) < 100 * 2**-50
            continue
        assert all(abs(x - float(y)) < 2**-24 for x, y in zip(found_weights, by, strict=True))


def resized(x, axis, table):
    """Return sums of weighted neighbours along an axis: a product, then fused multiply-adds."""
    places, weights = table
    rows = x.movedim(axis, -1)
    out = torch.empty(*rows.shape[:-1], len(places))
    for row, result in zip(
        rows.reshape(-1, x.shape[axis]).tolist(), out.view(-1, len(places)), strict=True
    ):
        for j, (at, by) in enumerate(zip(places.tolist(), weights.tolist(), strict=True)):
            value = float(torch.tensor(by[0]) * torch.tensor(row[at[0]]))
            for place, weight in zip(at[1:], by[1:], strict=True):
                value = fma(weight, row[place], value)
            result[j] = value
    return out.movedim(-1, axis)


def spread(grad, axis, before, table):
    """Return sums of weight · grad along an axis, in order, by fused multiply-adds."""
    places, weights = table
    rows = grad.movedim(axis, -1)
    out = torch.empty(*rows.shape[:-1], before)
    for row, result in zip(
        rows.reshape(-1, len(places)).tolist(), out.view(-1, before), strict=True
    ):
        sums = [0.0] * before
        for value, at, by in zip(row, places.tolist(), weights.tolist(), strict=True):
            for place, weight in zip(at, by, strict=True):
                sums[place] = fma(weight, value, sums[place])
        result.copy_(torch.tensor(sums))
    return out.movedim(-1, axis)


BITS = [
    ("linear", (2, 3, 7), (13,), False),
    ("bilinear", (2, 3, 7, 5), (4, 11), True),
    ("bilinear", (1, 17, 4, 6), (8, 12), False),
    ("bicubic", (2, 3, 7, 5), (4, 11), False),
    ("trilinear", (1, 2, 3, 5, 4), (4, 3, 7), False),
    ("nearest", (2, 3, 7, 5), (4, 11), None),
    ("nearest", (2, 3, 4, 5), (8, 10), None),
    ("nearest-exact", (2, 3, 7, 5), (4, 11), None),
]


@pytest.mark.parametrize("case", BITS, ids=str)
def test_bits_are_those_of_loops(variant, case):
    mode, shape, sizes, corners = case
    x, grad = odd(*shape), odd(*shape[:2], *sizes, seed=1)
    if mode.startswith("nearest"):
        expected = functional.interpolate(x, sizes, mode=mode)
        tables = [nearest(*one, mode) for one in zip(shape[2:], sizes, strict=True)]
    else:
        of = interpolation._cubic if mode == "bicubic" else interpolation._linear
        tables = [of(*one, corners, None) for one in zip(shape[2:], sizes, strict=True)]
        expected = x
        for axis in reversed(range(len(sizes))):
            expected = resized(expected, axis + 2, tables[axis])
    back = grad
    for axis, table in enumerate(tables):
        back = spread(back, axis + 2, shape[axis + 2], table)
    for one, weights in zip(arranged(x), arranged(grad), strict=True):
        leaf = one.detach().requires_grad_()
        with PortableMode():
            result = functional.interpolate(leaf, sizes, mode=mode, align_corners=corners)
            (found,) = torch.autograd.grad(result, leaf, weights)
        assert same(result.detach(), expected)
        assert same(found, back)


def nearest(before, after, mode):
    half = Fraction(1, 2) if mode == "nearest-exact" else 0
    places = [[math.floor(Fraction(before, after) * (at + half))] for at in range(after)]
    return torch.tensor(places), torch.ones(after, 1)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("options", [{"size": (20, 7)}, {"scale_factor": (1.7, 0.6)}])
def test_interpolation_is_near_that_of_float64(mode, options):
    """At most 16 roundings of sums below 64 in the result, 4 · 16 in a gradient."""
    found = []
    for dtype, inside in ((torch.float32, PortableMode()), (torch.float64, nullcontext())):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 3, 13, 11, generator=generator).to(dtype).requires_grad_()
        with inside:
            result = functional.interpolate(x, mode=mode, **options)
            weights = torch.linspace(-1, 1, result.numel(), dtype=dtype).view(result.shape)
            found.append([result, *torch.autograd.grad(result, x, weights)])
    for one, other in zip(*found, strict=True):
        assert float((one.double() - other).detach().abs().max()) < 64 * 64 * 2**-24


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("options", [{"size": (20, 7)}, {"scale_factor": (1.7, 0.6)}])
def test_inference_mode_does_not_matter(mode, options):
    x = odd(2, 3, 13, 11)
    with PortableMode():
        expected = functional.interpolate(x, mode=mode, **options)
        with torch.inference_mode():
            found = functional.interpolate(x, mode=mode, **options)
    assert same(found, expected)
