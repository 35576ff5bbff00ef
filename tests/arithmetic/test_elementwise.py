"""Functions of single elements against mpmath, in every variant of the C part."""

import functools
import math

import mpmath
import pytest
import torch

from evenstep.arithmetic import native
from evenstep.arithmetic.elements.elementwise import BINARY, UNARY
from evenstep.arithmetic.mode import PortableMode
from evenstep.errors import ModelError
from exact_floats import odd_values, same
from ulps import error, exact, values, worst

inf, nan, pi = math.inf, math.nan, math.pi


def far_out(function, limit=400):
    """A function that mpmath can't compute for large arguments, where it is constant here."""
    return lambda x: function(max(min(x, mpmath.mpf(limit)), mpmath.mpf(-limit)))


def logistic(x):
    return 1 / (1 + mpmath.exp(-x))


EXACT = {
    "exp": far_out(mpmath.exp),
    "exp2": far_out(lambda x: mpmath.power(2, x)),
    "expm1": far_out(mpmath.expm1),
    "log": mpmath.log,
    "log2": lambda x: mpmath.log(x, 2),
    "log10": mpmath.log10,
    "log1p": mpmath.log1p,
    "sigmoid": far_out(logistic),
    "sqrt": mpmath.sqrt,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tan": mpmath.tan,
    "asin": mpmath.asin,
    "acos": mpmath.acos,
    "atan": mpmath.atan,
    "sinh": far_out(mpmath.sinh),
    "cosh": far_out(mpmath.cosh),
    "tanh": far_out(mpmath.tanh),
    "asinh": lambda x: mpmath.sign(x) * mpmath.log1p(abs(x) + x * x / (1 + mpmath.hypot(1, x))),
    "acosh": lambda x: mpmath.log1p(x - 1 + mpmath.sqrt((x - 1) * (x + 1))) if x >= 1 else nan,
    "atanh": mpmath.atanh,
    "erf": far_out(mpmath.erf, 20),
    "erfc": far_out(mpmath.erfc, 20),
    "erfinv": mpmath.erfinv,
}
POINTS = {  # where a function has its range's end, a zero, or a change of formula
    "exp": (88.72284, -87.33655, -103.97, 0.34657),
    "exp2": (128.0, -126.0, -150.0, 0.5),
    "expm1": (88.72284, -17.3, 0.34657),
    "log": (1.0, 1.3333334, 0.6666667, 1.1754944e-38),
    "log2": (1.0, 1.3333334, 1.1754944e-38),
    "log10": (1.0, 10.0, 1.1754944e-38),
    "log1p": (-1.0, 0.33333334, -0.33333334, 1e-38),
    "sigmoid": (-87.33655, -103.97, -17.3, 17.3),
    "rsqrt": (1.0, 4.0, 1.2621774e-29, 1.1754944e-38),
    "sin": (pi, 131072.0, 2 * pi, 10000 * pi, -(2.0**120)),
    "cos": (pi / 2, 33433 * pi / 2, 131072.0, 1.5 * pi, 10001.5 * pi, 2.0**100),
    "tan": (pi / 4, 33433 * pi / 2, pi / 2, 131072.0, 2.0**60),
    "asin": (1.0, -1.0, 0.70710677),
    "acos": (1.0, -1.0, 0.70710677),
    "atan": (1.0, -1.0),
    "sinh": (89.415985, 1.0),
    "cosh": (89.415985, 1.0),
    "tanh": (9.01, 0.17),
    "acosh": (1.0, 1.3333334),
    "atanh": (1.0, -1.0, 0.33333334),
    "erf": (1.0, 3.92, -1.0),
    "erfc": (10.05, 9.19, 0.5),
    "erfinv": (1.0, -1.0, 0.9966),
}
ULPS = {"exp": 1, "log": 1, "erf": 1, "erfinv": 0.53, "sigmoid": 2.5}
ROUNDED_ONCE = 0.51  # of functions that compute in binary64
SLOW_IN_MPMATH = {"erfinv": 40, "erfc": 200, "erf": 200}


def portable(name, *args, **kwargs):
    with PortableMode():
        return getattr(torch.ops.aten, name)(*args, **kwargs)


@functools.cache
def reference(name, count):
    x = values(SLOW_IN_MPMATH.get(name, count), *POINTS.get(name, ()))
    return x, exact(EXACT[name], x)


@pytest.mark.parametrize("name", UNARY)
def test_function_is_within_an_ulp(variant, name):
    x, expected = reference(name, 500)
    assert worst(portable(name, x), expected) <= ULPS.get(name, ROUNDED_ONCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNARY)
def test_function_is_within_an_ulp_of_more_values(name):
    x = values(30 * SLOW_IN_MPMATH.get(name, 1000))
    assert worst(portable(name, x), exact(EXACT[name], x)) <= ULPS.get(name, ROUNDED_ONCE)


SPECIAL = {  # of 0, -0, inf, -inf
    "exp": (1, 1, inf, 0.0),
    "exp2": (1, 1, inf, 0.0),
    "expm1": (0.0, -0.0, inf, -1),
    "log": (-inf, -inf, inf, nan),
    "log2": (-inf, -inf, inf, nan),
    "log10": (-inf, -inf, inf, nan),
    "log1p": (0.0, -0.0, inf, nan),
    "sigmoid": (0.5, 0.5, 1, 0.0),
    "sqrt": (0.0, -0.0, inf, nan),
    "rsqrt": (inf, -inf, 0.0, nan),
    "sin": (0.0, -0.0, nan, nan),
    "cos": (1, 1, nan, nan),
    "tan": (0.0, -0.0, nan, nan),
    "asin": (0.0, -0.0, nan, nan),
    "acos": (pi / 2, pi / 2, nan, nan),
    "atan": (0.0, -0.0, pi / 2, -pi / 2),
    "sinh": (0.0, -0.0, inf, -inf),
    "cosh": (1, 1, inf, inf),
    "tanh": (0.0, -0.0, 1, -1),
    "asinh": (0.0, -0.0, inf, -inf),
    "acosh": (nan, nan, inf, nan),
    "atanh": (0.0, -0.0, nan, nan),
    "erf": (0.0, -0.0, 1, -1),
    "erfc": (1, 1, 0.0, 2),
    "erfinv": (0.0, -0.0, nan, nan),
}


@pytest.mark.parametrize("name", UNARY)
def test_special_values(variant, name):
    x = torch.tensor([0.0, -0.0, inf, -inf, nan])
    assert same(portable(name, x), torch.tensor([*SPECIAL[name], nan]))


def test_ends_of_domains(variant):
    assert same(portable("erfinv", torch.tensor([1.0, -1.0])), torch.tensor([inf, -inf]))
    assert same(portable("atanh", torch.tensor([1.0, -1.0])), torch.tensor([inf, -inf]))
    assert same(portable("log1p", torch.tensor([-1.0])), torch.tensor([-inf]))


EXACT_OF_TWO = {
    "atan2": mpmath.atan2,
    "hypot": mpmath.hypot,
    "logaddexp": lambda x, y: max(x, y) + mpmath.log1p(mpmath.exp(-abs(x - y))),
    "logaddexp2": lambda x, y: (
        max(x, y) + mpmath.log1p(mpmath.power(2, -abs(x - y))) / mpmath.log(2)
    ),
    "xlogy": lambda x, y: x * mpmath.log(y) if x else mpmath.mpf(0),
    "special_xlog1py": lambda x, y: x * mpmath.log1p(y) if x else mpmath.mpf(0),
}


@functools.cache
def reference_of_two(name):
    generator = torch.Generator().manual_seed(2)
    x, y = values(300), values(300)[torch.randperm(len(values(300)), generator=generator)]
    if name.startswith("logaddexp"):  # mpmath can't add numbers so far apart
        x, y = x.clamp(-400, 400), y.clamp(-400, 400)
    return x, y, exact(EXACT_OF_TWO[name], x, y)


@pytest.mark.parametrize("name", EXACT_OF_TWO)
def test_function_of_two_is_within_an_ulp(variant, name):
    x, y, expected = reference_of_two(name)
    assert worst(portable(name, x, y), expected) <= ROUNDED_ONCE


def test_angles_of_special_points(variant):
    odd = [0.0, -0.0, 1.0, -1.0, inf, -inf, nan]
    pairs = [(y, x) for y in odd for x in odd]
    expected = torch.tensor([math.atan2(y, x) for y, x in pairs])
    y, x = torch.tensor(pairs).unbind(1)
    assert same(portable("atan2", y, x), expected)


# ---- powers -----------------------------------------------------------------------------------


def test_power_is_within_an_ulp(variant):
    generator = torch.Generator().manual_seed(3)
    x = torch.exp(torch.randn(1500, generator=generator, dtype=torch.float64) * 4).float()
    y = torch.randn(1500, generator=generator) * 6
    whole = torch.arange(-30, 30.0).repeat(5)
    x, y = torch.cat([x, -x[:300]]), torch.cat([y, whole])
    expected = exact(mpmath.power, x, y)
    assert worst(portable("pow", x, y), expected) <= ROUNDED_ONCE
    for exponent in (2, 3, 0.5, -1, -0.5, -2, 1.7, 5, 0, 1):
        e = torch.tensor(float(exponent))  # a float32, as in torch
        expected = exact(mpmath.power, x[:300], e.expand(300))
        assert worst(portable("pow", x[:300], exponent), expected) <= ROUNDED_ONCE
        if exponent not in (2, 0.5, -1):  # these are rounded correctly
            powers = portable("pow", x, exponent)
            assert same(powers, portable("pow", x, e.expand(x.shape)))


def python_power(x, y):
    try:
        return math.pow(x, y)
    except ValueError:  # 0 to a negative power, or a negative number to a fraction
        if x != 0:
            return nan
        is_odd = math.isfinite(y) and y == int(y) and int(y) % 2 == 1
        return math.copysign(inf, x) if is_odd else inf


def test_powers_of_special_values(variant):
    odd = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, inf, -inf, nan, 2.0**30]
    pairs = [(x, y) for x in odd for y in odd if not (abs(x) > 1 and y == 2.0**30)]
    x, y = torch.tensor(pairs).unbind(1)
    expected = torch.tensor([python_power(*pair) for pair in pairs])
    assert same(portable("pow", x, y), expected)


def test_integer_powers_are_torchs():
    x = torch.arange(-4, 5)
    assert torch.equal(portable("pow", x, 3), x * x * x)
    assert portable("pow", x, 0.5).dtype is torch.float32
    assert same(portable("pow", 2.0, torch.arange(-3.0, 3)), 2.0 ** torch.arange(-3.0, 3))


# ---- which tensors ----------------------------------------------------------------------------


def layouts():
    """Tensors with the same elements, of many memory layouts."""
    x = odd_values(2 * 3 * 4 * 5, 4).reshape(2, 3, 4, 5)
    wide = torch.zeros(2, 3, 4, 11)
    wide[..., ::2][..., :5] = x
    yield x, x.to(memory_format=torch.channels_last)
    yield x, wide[..., :10:2]
    yield x.transpose(0, 3).contiguous(), x.transpose(0, 3)
    yield x[:, :1].expand(2, 3, 4, 5).contiguous(), x[:, :1].expand(2, 3, 4, 5)
    yield x[:0], x[:0].transpose(1, 2)
    yield x[0, 0, 0, 0].clone(), x[0, 0, 0, 0]


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tan", "gelu"])
def test_memory_layout_does_not_matter(variant, name):
    for dense, other in layouts():
        other = other.reshape(dense.shape) if other.ndim == dense.ndim == 0 else other
        if other.shape != dense.shape:
            other = other.transpose(1, 2)
        assert same(portable(name, other), portable(name, dense))


@pytest.mark.parametrize("name", UNARY)
def test_place_in_an_array_does_not_matter(variant, name):
    x = odd_values(70, 5)
    whole = portable(name, x)
    for start in (1, 2, 3, 33):
        assert same(portable(name, x[start:]), whole[start:])


@pytest.mark.parametrize("name", [*UNARY, "silu", "gelu", "mish", "log_sigmoid"])
def test_variants_agree(name):
    x = torch.cat([odd_values(20000, 6), values(5000)])
    run_by = {}
    for variant in native.runnable():
        with native.using(variant):
            run_by[variant] = portable(name, x)
    first, *others = run_by.values()
    assert all(same(first, other) for other in others)


def test_integers_are_converted_exactly():
    x = torch.arange(-5, 20)
    assert same(portable("exp", x), portable("exp", x.float()))
    assert same(portable("sigmoid", x > 3), portable("sigmoid", (x > 3).float()))
    assert same(portable("atan2", x, x + 1), portable("atan2", x.float(), x.float() + 1))
    half = portable("atan2", torch.tensor([1.0]), torch.tensor(0.3, dtype=torch.float64))
    assert same(half, portable("atan2", torch.tensor([1.0]), torch.tensor([0.3])))


@pytest.mark.parametrize("name", [*UNARY, "gelu", "silu"])
def test_float64_is_refused(name):
    with pytest.raises(ModelError, match=name):
        portable(name, torch.ones(3, dtype=torch.float64))


def test_in_place_and_out(variant):
    x = odd_values(50, 7)
    expected = portable("tanh", x)
    result = torch.empty(50)
    with PortableMode():
        torch.tanh(x, out=result)
        changed = x.clone().tanh_()
        (listed,) = torch._foreach_tanh([x])
    assert same(result, expected)
    assert same(changed, expected)
    assert same(listed, expected)


def test_logit(variant):
    x = torch.cat([torch.linspace(0, 1, 400), values(100, 0.5, 1e-30)])
    x = x[(x >= 0) & (x <= 1)]
    expected = exact(lambda z: mpmath.log(z / (1 - z)) if 0 < z < 1 else (2 * z - 1) * inf, x)
    assert worst(portable("logit", x), expected) <= ROUNDED_ONCE
    clamped = x.clamp(torch.tensor(0.1), 1 - torch.tensor(0.1))
    assert same(portable("logit", x, 0.1), portable("logit", clamped))


def test_error_of_a_float32():
    """One unit is the distance of float32 values at the exact value."""
    assert error(1.0 + 2.0**-23, mpmath.mpf(1)) == 1
    assert error(2.0**-149, mpmath.mpf(0)) == 1
    assert error(1.0, mpmath.nan) == inf
    assert error(inf, mpmath.mpf(2) ** 128) == 0
    assert error(inf, mpmath.mpf(2) ** 127) == inf
    assert {"atan2", "hypot"} < set(BINARY)
