"""Activations, gradients and losses against mpmath, fractions, and float64 through autograd."""

import functools
import math
from fractions import Fraction

import mpmath
import pytest
import torch
import torch.nn.functional as F

from evenstep.arithmetic.mode import PortableMode
from evenstep.arithmetic.operations import KERNELS
from exact_floats import fma, odd_values, rounded, same
from ulps import exact, values, worst

aten = torch.ops.aten
inf, nan = math.inf, math.nan
C = math.sqrt(8 / math.pi)


def logistic(x):
    return 1 / (1 + mpmath.exp(-x))


def softplus(x):
    return max(x, mpmath.mpf(0)) + mpmath.log1p(mpmath.exp(-abs(x)))


CASES = {  # name: torch's function, the exact one, the error in ulp
    "silu": (F.silu, lambda x: x * logistic(x), 3.5),
    "gelu": (F.gelu, lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2, 6),
    "gelu_tanh": (
        functools.partial(F.gelu, approximate="tanh"),
        lambda x: x * logistic(mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf(0.044715) * x**3)),
        1,
    ),
    "softplus": (functools.partial(F.softplus, threshold=200), softplus, 1),
    "log_sigmoid": (F.logsigmoid, lambda x: -softplus(-x), 1),
    "mish": (F.mish, lambda x: x * mpmath.tanh(softplus(x)), 1),
    "elu": (F.elu, lambda x: x if x > 0 else mpmath.expm1(x), 1),
    "celu": (
        functools.partial(F.celu, alpha=2.0),
        lambda x: x if x > 0 else 2 * mpmath.expm1(x / 2),
        1,
    ),
}


@functools.cache
def reference(name):
    x = values(150, 1.0, -3.0, -15.0, -103.0).clamp(-200, 200)
    return x, exact(CASES[name][1], x)


@pytest.mark.parametrize("name", CASES)
def test_activation_is_close_to_the_exact_value(variant, name):
    function, _, limit = CASES[name]
    x, expected = reference(name)
    with PortableMode():
        result = function(x)
    assert worst(result, expected) <= limit


ZEROS = torch.tensor([0.0, -0.0, inf, -inf, nan])


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "mish"])
def test_limits_of_activations(variant, name):
    """Where x is infinite, torch gives NaN for some of these; here it is the limit."""
    x = ZEROS.clone().requires_grad_()
    with PortableMode():
        result = CASES[name][0](x)
        (slope,) = torch.autograd.grad(result, x, torch.ones(5))
    assert same(result.detach(), torch.tensor([0.0, -0.0, inf, -0.0, nan]))
    half = 0.6 if name == "mish" else 0.5
    assert same(slope.abs(), torch.tensor([half, half, 1.0, 0.0, nan]))


def of_each(function, *tensors):
    """Apply a function of fractions or floats to the elements of float32 tensors."""
    return torch.tensor(
        [function(*each) for each in zip(*map(torch.Tensor.tolist, tensors), strict=True)]
    )


def once(value):
    return Fraction(rounded(value))


def of_fractions(function):
    return lambda *each: float(function(*map(Fraction, each)))


EXACT = {  # operations of single roundings, in their order
    "sigmoid_backward": of_fractions(lambda g, y: once(g * once(once(1 - y) * y))),
    "tanh_backward": lambda g, y: float(once(Fraction(g) * Fraction(fma(-y, y, 1.0)))),
    "hardswish_backward": of_fractions(
        lambda g, x: once(
            g * (0 if x <= -3 else 1 if x >= 3 else once(once(x / 3) + Fraction(1, 2)))
        )
    ),
    "hardsigmoid_backward": of_fractions(
        lambda g, x: once(g * once(Fraction(1, 6))) if -3 < x < 3 else Fraction(0)
    ),
    "leaky_relu_backward": of_fractions(
        lambda g, x: g if x > 0 else once(g * Fraction(float(torch.tensor(0.3))))
    ),
}


def test_gated_linear_unit_is_a_product(variant):
    a, b = odd_values(301, 3), odd_values(301, 4)
    with PortableMode():
        result, gate = F.glu(torch.stack([a, b], 1), 1)[:, 0], b.sigmoid()
    assert same(result, a * gate)


@pytest.mark.parametrize("name", EXACT)
def test_gradients_of_single_roundings(variant, name):
    g, x = (odd_values(1500, seed, special=False) % 8 for seed in (0, 1))
    extra = (0.3, False) if name.startswith("leaky") else ()
    with PortableMode():
        result = getattr(aten, name)(g, x, *extra)
    assert torch.equal(result, of_each(EXACT[name], g, x))  # of either sign where it is 0


def clipped(x):
    return min(max(once(x + 3), Fraction(0)), Fraction(6))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (F.hardsigmoid, lambda x: once(clipped(x) / 6)),
        (F.hardswish, lambda x: once(once(x * clipped(x)) / 6)),
        (lambda x: F.leaky_relu(x, 0.25), lambda x: x if x > 0 else once(x / 4)),
        (lambda x: x**3, lambda x: once(x**3)),
    ],
)
def test_activations_of_single_roundings(variant, function, expected):
    x = odd_values(1500, 2, special=False) % 8 - 4
    with PortableMode():
        result = function(x)
    assert torch.equal(result, of_each(of_fractions(expected), x))


# ---- gradients through autograd ----------------------------------------------------------------

# In these intervals, a gradient is computed in at most 12 roundings of at most 1 ulp (2⁻²³), 6 ulp
# in `gelu`. Each is amplified at most sixfold by later subtractions: 1 − x² is at least 0.19, and
# sums of slopes have terms of at most 1.2 where they cancel (hence the absolute part).
ROUNDINGS, AMPLIFIED = 12 + 6, 6
LIMIT = ROUNDINGS * AMPLIFIED * 2.0**-23

WIDE, POSITIVE, UNIT = (-4.0, 4.0), (0.05, 4.0), (-0.9, 0.9)
GRADIENTS = {
    **{name: (getattr(torch, name), WIDE) for name in ("exp", "exp2", "expm1", "sin", "cos")},
    **{name: (getattr(torch, name), WIDE) for name in ("sinh", "cosh", "tanh", "atan", "asinh")},
    **{name: (getattr(torch, name), WIDE) for name in ("erf", "erfc", "sigmoid")},
    **{
        name: (getattr(torch, name), POSITIVE)
        for name in ("log", "log2", "log10", "log1p", "rsqrt")
    },
    **{name: (getattr(torch, name), UNIT) for name in ("asin", "acos", "atanh", "erfinv", "tan")},
    **{name: (CASES[name][0], WIDE) for name in CASES},
    "acosh": (lambda x: torch.acosh(x + 1.2), POSITIVE),
    "logit": (lambda x: torch.logit(x, 0.2), (0.1, 0.9)),
    "softplus of beta": (lambda x: F.softplus(x, 2.5, 3), WIDE),
    "selu": (F.selu, WIDE),
    "hardswish": (F.hardswish, WIDE),
    "hardsigmoid": (F.hardsigmoid, WIDE),
    "glu": (lambda x: F.glu(x.reshape(20, 20), 0), WIDE),
    "leaky_relu": (F.leaky_relu, WIDE),
    "elu in place": (lambda x: F.elu(x * 1, inplace=True), WIDE),
    "prelu": (lambda x: F.prelu(x, x.new_full((1,), 0.3)), WIDE),
    "softshrink": (F.softshrink, WIDE),
    "hardshrink": (F.hardshrink, WIDE),
    "atan2": (lambda x: torch.atan2(x, x.flip(0)), POSITIVE),
    "hypot": (lambda x: torch.hypot(x, x.flip(0)), POSITIVE),
    "logaddexp": (lambda x: torch.logaddexp(x, x.flip(0)), WIDE),
    "xlogy": (lambda x: torch.xlogy(x, x.flip(0)), POSITIVE),
    "power": (lambda x: x**1.7, POSITIVE),
    "negative power": (lambda x: x**-2, POSITIVE),
    "power of tensors": (lambda x: x ** x.flip(0), POSITIVE),
    "power of a number": (lambda x: 2.5**x, WIDE),
}


def compared(function, *inputs):
    """Return results and gradients, portable and in float64."""
    found = []
    for dtype, mode in ((torch.float32, PortableMode()), (torch.float64, None)):
        given = [one.to(dtype, copy=True).requires_grad_() for one in inputs[:1]] + [
            one.to(dtype) for one in inputs[1:]
        ]
        weights = torch.rand(function(*given).shape, generator=torch.Generator().manual_seed(0))
        if mode is None:
            result = function(*given)
            result.backward(weights.to(dtype))
        else:
            with mode:
                result = function(*given)
                result.backward(weights)
        found.append((result.detach(), given[0].grad))
    return found


def assert_close(found):
    for portable, plain in zip(*found, strict=True):
        error = (portable.double() - plain).abs()
        assert (error <= LIMIT * plain.abs().clamp(min=1.2)).all()


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_float64(variant, name):
    function, (low, high) = GRADIENTS[name]
    x = torch.rand(400, generator=torch.Generator().manual_seed(8)) * (high - low) + low
    assert_close(compared(function, x))


LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": functools.partial(F.smooth_l1_loss, beta=0.4),
    "huber": functools.partial(F.huber_loss, delta=0.6),
    "l1": F.l1_loss,
    "with logits": F.binary_cross_entropy_with_logits,
    "weighted": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, y, weight=y + 0.5, pos_weight=y + 2, reduction=reduction
    ),
    "cross-entropy": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y, weight=y + 0.5, reduction=reduction
    ),
    "soft margin": lambda x, y, reduction: F.soft_margin_loss(x, y - 0.5, reduction=reduction),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_float64(variant, name, reduction):
    if reduction != "none" and aten.sum.default not in KERNELS:
        pytest.skip("portable arithmetic has no sums here")
    generator = torch.Generator().manual_seed(9)
    x, y = torch.randn(20, 5, generator=generator), torch.rand(20, 5, generator=generator)
    assert_close(compared(functools.partial(LOSSES[name], reduction=reduction), x, y))


def test_gradient_of_a_mean_loss(variant):
    """Each element gets the gradient divided by the number of elements, rounded once."""
    x, y = odd_values(33, 10, special=False) % 4, odd_values(33, 11, special=False) % 4
    with PortableMode():
        result = aten.mse_loss_backward(torch.tensor(0.7), x, y, 1)
    share = once(Fraction(float(torch.tensor(0.7))) / 33)
    expected = of_each(of_fractions(lambda a, b: once(2 * once(a - b) * share)), x, y)
    assert torch.equal(result, expected)


def test_losses_in_half_precision():
    x, y = torch.randn(9).bfloat16(), torch.rand(9).bfloat16()
    with PortableMode():
        result = F.smooth_l1_loss(x, y, reduction="none")
        expected = F.smooth_l1_loss((x - y).float(), torch.zeros(9), reduction="none").bfloat16()
    assert torch.equal(result, expected)
