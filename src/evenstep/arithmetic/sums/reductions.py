"""Sums and what is made of them: means, variances, norms, products.

The order of every sum is that of `c/sums.h`: term i of n goes to lane i mod 16, where terms are
numbered in the row-major order of the reduced dimensions; lanes add in double, and are added by
halves; the sum is rounded once. Strides and memory formats can't change it. A sum starts from +0,
so that of negative zeros is +0.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from evenstep.arithmetic.arrays import Scalar, is_float32
from evenstep.arithmetic.native import Function, scratch
from evenstep.arithmetic.operations import KERNELS, kernel
from evenstep.arithmetic.sums.arranged import Dims, arrangement, sizes_around

aten = torch.ops.aten

_reduce = Function("reduce", "lllllpdlpp")
_cumulate = Function("cumulate", "llllppp")
_log_sum_exp = Function("log_sum_exp", "llppp")

VALUES, SIZES, SQUARES, NONZEROS, NUMBERS, DOUBLES, DEVIATIONS = range(7)  # as in c/sums.h


def reduced_to(
    kind: int,
    x: torch.Tensor,
    dim: Dims,
    keepdim: bool,
    *,
    is_mean: bool = False,
    root: bool = False,
) -> torch.Tensor:
    """Return the sum of a kind's terms: divided by their number, or its square root, in double."""
    to = arrangement(x, dim, keepdim)
    array = to.array(x)
    out = x.new_empty(to.shape)
    kind = DOUBLES if x.dtype is torch.float64 else kind
    _reduce(
        *(kind, to.outer, to.pieces, to.n, to.inner, array.data_ptr()),
        *(to.pieces * to.n if is_mean else 1, root, 0, out.data_ptr()),
    )
    return to.finished(out)


def _converted(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x if dtype is None or dtype is x.dtype else x.to(dtype)


def _is_summed(x: torch.Tensor) -> bool:
    return is_float32(x) or (x.dtype is torch.float64 and x.is_cpu and not x.is_sparse)


@kernel("sum", "sum.dim_IntList")
def sum_of(
    x: torch.Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of float32 or float64 numbers."""
    x = _converted(x, dtype)
    if _is_summed(x):
        return reduced_to(VALUES, x, dim, keepdim)
    is_exact = not (x.is_floating_point() or x.is_complex())
    return aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype) if is_exact else NotImplemented


@kernel("mean", "mean.dim")
def mean(
    x: torch.Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum divided by the number of terms, in double, rounded once."""
    x = _converted(x, dtype)
    return reduced_to(VALUES, x, dim, keepdim, is_mean=True) if _is_summed(x) else NotImplemented


@kernel("nansum")
def nansum(
    x: torch.Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum, NaN counted as 0."""
    x = _converted(x, dtype)
    return reduced_to(NUMBERS, x, dim, keepdim) if is_float32(x) else NotImplemented


@kernel("trace")
def trace(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the diagonal."""
    return reduced_to(VALUES, x.diagonal(), None, False) if _is_summed(x) else NotImplemented


@kernel("var_mean.correction")
def var_mean(
    x: torch.Tensor,
    dim: Dims = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
    root: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variance, or its square root, the standard deviation, and the mean.

    The mean is the sum / n in double; the variance is the sum of (x − mean)² divided by
    max(0, n − correction), in double with the mean before it is rounded.
    """
    if not is_float32(x):
        return NotImplemented
    to = arrangement(x, dim, keepdim)
    array = to.array(x)
    spread, centre = x.new_empty(to.shape), x.new_empty(to.shape)
    divisor = max(0.0, to.pieces * to.n - (1 if correction is None else float(correction)))
    _reduce(
        *(DEVIATIONS, to.outer, to.pieces, to.n, to.inner, array.data_ptr(), divisor, root),
        *(centre.data_ptr(), spread.data_ptr()),
    )
    return to.finished(spread), to.finished(centre)


@kernel("var.correction")
def var(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the variance, or the standard deviation."""
    moments = var_mean(x, *args, **kwargs)
    return moments if moments is NotImplemented else moments[0]


kernel("std_mean.correction")(functools.partial(var_mean, root=True))
kernel("std.correction")(functools.partial(var, root=True))


@kernel("linalg_vector_norm")
def vector_norm(
    x: torch.Tensor,
    ord: Scalar = 2,  # noqa: A002 - torch's name
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a norm.

    Order 2: √(sum of x²), in double, rounded once; 1: the sum of |x|; 0: the number of elements
    that aren't 0; ±inf: the largest or smallest |x|; p: (sum of |x|^p)^(1 / p), where each of the
    two powers and the sum are rounded.
    """
    if not is_float32(x) or dtype not in (None, torch.float32):
        return NotImplemented
    if ord == 2:
        return reduced_to(SQUARES, x, dim, keepdim, root=True)
    if math.isinf(ord):
        return aten.linalg_vector_norm(x, ord, dim, keepdim)  # it only compares
    if ord in (0, 1):
        return reduced_to(SIZES if ord else NONZEROS, x, dim, keepdim)
    power = KERNELS.get(aten.pow.Tensor_Scalar)
    if power is None or (ord < 0 and not x.numel()):
        return NotImplemented
    return power(reduced_to(VALUES, power(x.abs(), ord), dim, keepdim), 1 / ord)


@kernel("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype")
def norm(
    x: torch.Tensor,
    p: Scalar | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a norm, of order 2 if p is None."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@kernel("dist")
def dist(a: torch.Tensor, b: torch.Tensor, p: Scalar = 2) -> torch.Tensor:
    """Return the norm of a − b."""
    return vector_norm(a - b, p) if is_float32(a, b) else NotImplemented


def _cumulated(
    products: bool, x: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> torch.Tensor:
    x = _converted(x, dtype)
    if not is_float32(x):
        return NotImplemented
    outer, n, inner = sizes_around(x, dim)
    x = x.contiguous()
    out = torch.empty_like(x)
    _cumulate(products, outer, n, inner, x.data_ptr(), out.data_ptr(), scratch(2 * inner))
    return out


@kernel("cumsum")
def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sums of the first 1, 2, … numbers: one after the other in double, each rounded."""
    return _cumulated(False, x, dim, dtype)


@kernel("cumprod")
def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the products of the first 1, 2, … numbers: in double, each rounded."""
    return _cumulated(True, x, dim, dtype)


@kernel("prod.dim_int")
def prod(
    x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the product: one number after the other in double, rounded once."""
    products = _cumulated(True, x, dim, dtype)
    if products is NotImplemented or not x.ndim:
        return products
    if not x.shape[dim]:
        return torch.ones_like(x.sum(dim, keepdim), dtype=products.dtype)
    return products.narrow(dim, -1, 1).clone() if keepdim else products.select(dim, -1).clone()


@kernel("prod")
def prod_of_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the product of all numbers, in row-major order."""
    return prod(x.reshape(-1), 0, dtype=dtype)


@kernel("logsumexp")
def logsumexp(x: torch.Tensor, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    """Return log(sum of exp(x − m)) + m, m the largest x, or 0 if that is infinite."""
    if not is_float32(x):
        return NotImplemented
    to = arrangement(x, dim, keepdim, rows=True)
    array, out = to.array(x), x.new_empty(to.shape)
    _log_sum_exp(to.outer, to.n, array.data_ptr(), out.data_ptr(), scratch(to.n))
    return to.finished(out)
