"""Functions of single elements: exponentials, logarithms, circular functions, powers.

Each is within 1 ulp (unit in the last place) of the exact value for every float32, also denormal
ones; the sigmoid is within 2.5 ulp. `c/functions.h` has the formulas.

`sqrt` is here because torch's own, where it calls MKL, is not always rounded correctly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import cast

import torch

from evenstep.arithmetic.arrays import Scalar, addresses, aligned
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import kernel
from evenstep.errors import ModelError

REFUSED = cast(torch.Tensor, NotImplemented)

UNARY = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid"),
    *("sqrt", "rsqrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "erf", "erfc", "erfinv"),
)
BINARY = ("atan2", "hypot", "logaddexp", "logaddexp2")

_power = Function("power", "lpdp")
_pow = Function("binary_pow", "lppp")
_xlogy = Function("binary_xlogy", "lppp")
_xlog1py = Function("binary_xlog1py", "lppp")
_logit = Function("logit", "lpddp")


def unary(name: str) -> Callable[..., torch.Tensor]:
    """Return a kernel that applies the C function `unary_NAME` to each element of its argument."""
    return functools.partial(apply_to_one, Function(f"unary_{name}", "lpp"))


def of_two(name: str) -> Callable[..., torch.Tensor]:
    """Return a kernel that applies the C function `binary_NAME` to two tensors of float32."""
    run = Function(f"binary_{name}", "lppp")

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        is_simple = (
            a.dtype is b.dtype is torch.float32
            and a.shape == b.shape
            and a.is_contiguous()
            and b.is_contiguous()
            and a.is_cpu
            and b.is_cpu
        )
        if not is_simple:
            return apply(run, (a, b))
        out = torch.empty_like(a)
        run(a.numel(), a.data_ptr(), b.data_ptr(), out.data_ptr())
        return out

    return function


def apply_to_one(run: Callable[..., None], x: torch.Tensor, *numbers: float) -> torch.Tensor:
    """Call a C function of an array and numbers; integers are converted to float32 first."""
    if x.dtype is not torch.float32 or x.layout is not torch.strided or not x.is_cpu:
        if not (x.layout is torch.strided and x.is_cpu and _becomes_float32(x.dtype)):
            return REFUSED
        x = x.to(torch.float32)
    if not x.is_contiguous():
        (x,) = aligned(x)
    out = torch.empty_like(x)
    run(x.numel(), x.data_ptr(), *numbers, out.data_ptr())
    return out


def apply(
    run: Callable[..., None], tensors: tuple[torch.Tensor, ...], *numbers: float
) -> torch.Tensor:
    """Call a C function of arrays and numbers, after broadcasting tensors of float32."""
    shape = tensors[0].shape
    are_alike = True
    for one in tensors:
        if one.dtype is not torch.float32 or one.layout is not torch.strided or not one.is_cpu:
            return REFUSED
        are_alike = are_alike and one.is_contiguous() and one.shape == shape
    arrays = tensors if are_alike else aligned(*tensors)
    out = torch.empty_like(arrays[0])
    run(out.numel(), *addresses(arrays), *numbers, out.data_ptr())
    return out


def apply_promoted(
    run: Callable[..., None], a: torch.Tensor | Scalar, b: torch.Tensor | Scalar
) -> torch.Tensor:
    """Call a C function of two arguments after promoting them as torch does."""
    dtype = torch.result_type(a, b)
    if dtype is not torch.float32 and not _becomes_float32(dtype):
        return REFUSED
    tensors = (
        one.to(torch.float32)
        if isinstance(one, torch.Tensor)
        else torch.full((), one, dtype=torch.float32)
        for one in (a, b)
    )
    return apply(run, tuple(tensors))


def _becomes_float32(dtype: torch.dtype) -> bool:
    """Whether functions of real numbers convert a dtype to float32: those of integers.

    Raises:
        ModelError: they convert integers to a different dtype.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return False
    default = torch.get_default_dtype()
    if default is not torch.float32:
        raise ModelError(
            f"a function of {dtype} gives {default}, the default dtype, which is not portable: "
            f"convert the integers to torch.float32 first"
        )
    return True


for _name in UNARY:
    kernel(_name)(unary(_name))
for _name in BINARY:
    kernel(_name)(functools.partial(apply_promoted, Function(f"binary_{_name}", "lppp")))

_sqrt = unary("sqrt")
_rsqrt = unary("rsqrt")
_cube = unary("cube")


@kernel("pow.Tensor_Scalar")
def power(x: torch.Tensor, exponent: Scalar) -> torch.Tensor:
    """Return x to a power, within 1 ulp.

    x² is x · x, x³ is x · x · x in binary64, and as in torch, x^½ is √x and x⁻¹ is 1 / x. Other
    powers are exp(exponent · ln |x|) in binary64, with the sign and the special values of
    IEEE-754's `pow`. Each is rounded once.
    """
    if torch.result_type(x, exponent) is not torch.float32:
        return REFUSED
    x = x.to(torch.float32)
    if exponent == 2:
        return x * x
    if exponent == 3:
        return _cube(x)
    if exponent == 1:
        return x.clone()
    if exponent == 0.5:
        return _sqrt(x)
    if exponent == -1:
        return torch.reciprocal(x)
    if exponent == -0.5:
        return _rsqrt(x)
    return apply_to_one(_power, x, float(exponent))


@kernel("pow.Tensor_Tensor", "pow.Scalar")
def pow_of(x: torch.Tensor | Scalar, exponent: torch.Tensor) -> torch.Tensor:
    """Return x to the power `exponent`, element by element: `power` without its shortcuts."""
    if torch.result_type(x, exponent) is not torch.float32:
        return REFUSED
    return apply_promoted(_pow, x, exponent)


@kernel("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def xlogy(x: torch.Tensor | Scalar, y: torch.Tensor | Scalar) -> torch.Tensor:
    """Return x ln(y), 0 where x is 0 and y is no NaN."""
    return apply_promoted(_xlogy, x, y)


@kernel(
    "special_xlog1py",
    "special_xlog1py.other_scalar",
    "special_xlog1py.self_scalar",
)
def xlog1py(x: torch.Tensor | Scalar, y: torch.Tensor | Scalar) -> torch.Tensor:
    """Return x ln(1 + y), 0 where x is 0 and y is no NaN."""
    return apply_promoted(_xlog1py, x, y)


@kernel("logit")
def logit(x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """Return ln(x / (1 − x)), of x between eps and 1 − eps."""
    return apply_to_one(_logit, x, *logit_range(eps))


def logit_range(eps: float | None) -> tuple[float, float]:
    """Return the least and the greatest argument that `logit` does not change."""
    if eps is None or eps < 0:
        return -math.inf, math.inf
    low = torch.tensor(eps, dtype=torch.float32)
    return float(low), float(1 - low)
