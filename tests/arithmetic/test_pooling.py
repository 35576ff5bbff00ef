"""Pooling: bit for bit that of loops over windows, and near float64's with its gradients."""

import itertools
import math
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch.nn import functional

from arrangements import arranged
from evenstep.arithmetic.mode import PortableMode
from exact_floats import fma, odd, rounded, same


def total(values):
    """Return 0 + the first + the second, and so on, each rounded."""
    result = 0.0
    for value in values:
        result = fma(1.0, value, result)
    return result


def quotient(a, b):
    return rounded(Fraction(a) / Fraction(b)) if math.isfinite(a) and a != 0 else a / b


class Windows:
    """Windows of an axis, found by trying every number: of fixed size, or parts."""

    def __init__(self, size, count, window=None, stride=1, padding=0):
        starts = range(-padding, size + padding)
        if window is None:
            spans = [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]
            self.padded = [end - begin for begin, end in spans]
        else:
            spans = [(at * stride - padding, at * stride - padding + window) for at in range(count)]
            self.padded = [sum(begin <= x < end for x in starts) for begin, end in spans]
        self.inside = [[x for x in range(size) if begin <= x < end] for begin, end in spans]


def pooled(x, axes, include_pad, divisor):
    """Return means of windows: sums of columns first, then of the columns."""
    out = torch.empty(*x.shape[: -len(axes)], *(len(one.inside) for one in axes))
    for box in itertools.product(*(range(len(one.inside)) for one in axes)):
        inside = [one.inside[at] for one, at in zip(axes, box, strict=True)]
        by = divisor or divisor_of(axes, box, include_pad)
        for plane in itertools.product(*map(range, x.shape[: -len(axes)])):
            columns = [
                total(float(x[(*plane, *rest, w)]) for rest in itertools.product(*inside[:-1]))
                for w in inside[-1]
            ]
            out[(*plane, *box)] = quotient(total(columns), by)
    return out


def divisor_of(axes, box, include_pad):
    sizes = [one.padded if include_pad else list(map(len, one.inside)) for one in axes]
    return math.prod(one[at] for one, at in zip(sizes, box, strict=True))


def gradient(grad, shape, axes, include_pad, divisor):
    """Return sums of shares: along rows of windows first, then over these rows."""
    result = torch.empty(shape)
    for plane in itertools.product(*map(range, shape[: -len(axes)])):
        for place in itertools.product(*map(range, shape[-len(axes) :])):
            holding = [
                [at for at, inside in enumerate(one.inside) if x in inside]
                for one, x in zip(axes, place, strict=True)
            ]
            rows = [
                total(
                    quotient(
                        float(grad[(*plane, *rest, w)]),
                        divisor or divisor_of(axes, (*rest, w), include_pad),
                    )
                    for w in holding[-1]
                )
                for rest in itertools.product(*holding[:-1])
            ]
            result[(*plane, *place)] = total(rows)
    return result


AVERAGES = [
    ((2, 3, 7, 9), (2, 2), {}),
    ((2, 3, 8, 7), (3, 2), {"stride": (2, 1), "padding": 1}),
    ((1, 2, 7, 7), (3, 3), {"stride": 2, "padding": 1, "ceil_mode": True}),
    ((3, 8, 8), (3, 3), {"stride": 3, "padding": 1, "count_include_pad": False, "ceil_mode": True}),
    ((2, 2, 6, 5), (2, 3), {"divisor_override": 7}),
    ((2, 2, 5, 4, 6), (2, 3, 2), {"stride": 2, "padding": (1, 0, 1), "ceil_mode": True}),
    ((1, 17, 4, 4), (4, 4), {}),
]


def axes_of(shape, window, options, counts):
    ndim = len(window)
    each = [options.get(name) for name in ("stride", "padding")]
    stride, padding = ([one] * ndim if not isinstance(one, tuple) else one for one in each)
    return [
        Windows(size, count, k, s or k, p or 0)
        for size, count, k, s, p in zip(shape[-ndim:], counts, window, stride, padding, strict=True)
    ]


@pytest.mark.parametrize("case", AVERAGES, ids=str)
def test_average_pooling(variant, case):
    shape, window, options = case
    pool = functional.avg_pool2d if len(window) == 2 else functional.avg_pool3d
    counts = pool(torch.zeros(shape).double(), window, **options).shape[-len(window) :]
    axes = axes_of(shape, window, options, counts)
    how = options.get("count_include_pad", True), options.get("divisor_override")
    x = odd(*shape)
    check(lambda x: pool(x, window, **options), x, pooled(x, axes, *how), axes, how)


def check(run, x, expected, axes, how):
    """Compare a pooling and its gradient in all memory layouts."""
    grad = odd(*expected.shape, seed=9)
    expected_gradient = gradient(grad, x.shape, axes, *how)
    for one, weights in zip(arranged(x), arranged(grad), strict=True):
        leaf = one.detach().requires_grad_()
        with PortableMode():
            result = run(leaf)
            (found,) = torch.autograd.grad(result, leaf, weights)
        assert same(result.detach(), expected)
        assert same(found, expected_gradient)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 3, 7, 9), (3, 4)),
        ((3, 8, 6), (4, 3)),
        ((2, 2, 3, 2), (5, 7)),
        ((1, 2, 5, 6, 4), (2, 4, 3)),
    ],
)
def test_adaptive_average_pooling(variant, shape, sizes):
    ndim = len(sizes)
    pool = functional.adaptive_avg_pool2d if ndim == 2 else functional.adaptive_avg_pool3d
    axes = [Windows(size, count) for size, count in zip(shape[-ndim:], sizes, strict=True)]
    x = odd(*shape)
    how = (True, None)
    check(lambda x: pool(x, sizes), x, pooled(x, axes, *how), axes, how)


MAXIMA = {
    "2d": ((2, 3, 7, 9), lambda x: functional.max_pool2d_with_indices(x, 3, 2, 1)),
    "2d, dilated": (
        (2, 3, 9, 9),
        lambda x: functional.max_pool2d_with_indices(x, 3, 1, 1, 2, True),
    ),
    "2d, one image": ((3, 7, 6), lambda x: functional.max_pool2d_with_indices(x, 3, 1)),
    "3d": ((2, 3, 5, 4, 6), lambda x: functional.max_pool3d_with_indices(x, 3, 2, 1)),
    "adaptive 2d": ((2, 3, 7, 9), lambda x: functional.adaptive_max_pool2d(x, 4, True)),
    "adaptive 3d": ((2, 3, 5, 4, 6), lambda x: functional.adaptive_max_pool3d(x, 3, True)),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_gradients_of_maxima(variant, name):
    shape, run = MAXIMA[name]
    x = odd(*shape)
    _, at = run(x)
    ndim = 3 if "3d" in name else 2
    planes = math.prod(shape[:-ndim])
    grad = odd(*at.shape, seed=9)
    expected = torch.zeros(planes, math.prod(shape[-ndim:])).tolist()
    for row, places, values in zip(
        expected, at.reshape(planes, -1).tolist(), grad.reshape(planes, -1).tolist(), strict=True
    ):
        for place, value in zip(places, values, strict=True):
            row[place] = fma(1.0, value, row[place])
    for one, weights in itertools.product(arranged(x), arranged(grad)):
        leaf = one.detach().requires_grad_()
        with PortableMode():
            result, places = run(leaf)
            (found,) = torch.autograd.grad(result, leaf, weights)
        assert torch.equal(places, at)
        assert same(found, torch.tensor(expected).reshape(shape))


POOLS = {
    "avg_pool1d": ((2, 3, 40), lambda x: functional.avg_pool1d(x, 3, 2, 1, True)),
    "avg_pool2d": ((2, 3, 13, 11), lambda x: functional.avg_pool2d(x, 3, 2, 1)),
    "adaptive_avg_pool1d": ((2, 3, 40), lambda x: functional.adaptive_avg_pool1d(x, 7)),
    "adaptive_avg_pool3d": (
        (2, 3, 5, 7, 6),
        lambda x: functional.adaptive_avg_pool3d(x, (2, 3, 4)),
    ),
    "max_pool1d": ((2, 3, 40), lambda x: functional.max_pool1d(x, 3, 2, 1)),
    "max_pool2d": ((2, 3, 13, 11), lambda x: functional.max_pool2d(x, 3, 1, 1)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_near_that_of_float64(name):
    """A sum of at most 64 numbers below 8 in size is off by at most 64 roundings below 512."""
    shape, run = POOLS[name]
    found = []
    for dtype, mode in ((torch.float32, PortableMode()), (torch.float64, nullcontext())):
        x = (
            torch.randn(shape, generator=torch.Generator().manual_seed(1))
            .to(dtype)
            .requires_grad_()
        )
        with mode:
            result = run(x)
            weights = torch.linspace(-1, 1, result.numel(), dtype=dtype).view(result.shape)
            found.append([result, *torch.autograd.grad(result, x, weights)])
    for one, other in zip(*found, strict=True):
        assert float((one.double() - other).detach().abs().max()) < 64 * 512 * 2**-24


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 0, 8, 8)])
def test_pooling_of_nothing(shape):
    x = torch.zeros(shape, requires_grad=True)
    with PortableMode():
        for pool in (functional.avg_pool2d, functional.adaptive_avg_pool2d):
            result = pool(x, 2)
            assert result.shape == pool(torch.zeros(shape), 2).shape
            assert torch.autograd.grad(result, x, torch.zeros_like(result))[0].shape == shape


@pytest.mark.parametrize(("window", "padding"), [(3, 2), (9, 0)])
def test_impossible_windows_are_refused(window, padding):
    with PortableMode(), pytest.raises(RuntimeError, match=r"pad should be|too small"):
        functional.avg_pool2d(torch.zeros(1, 1, 8, 8), window, padding=padding)
