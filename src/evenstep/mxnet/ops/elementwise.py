"""Functions that treat every element alike: arithmetic, comparisons, and the usual mathematics."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Function: TypeAlias = Callable[..., Any]

_SAME_NAME = (
    "abs ceil cos cosh erf erfinv exp expm1 floor isfinite isinf isnan log log10 log1p log2 "
    "reciprocal relu rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
)
_OTHER_NAME: dict[str, Function] = {
    "arccos": torch.acos,
    "arccosh": torch.acosh,
    "arcsin": torch.asin,
    "arcsinh": torch.asinh,
    "arctan": torch.atan,
    "arctanh": torch.atanh,
    "fix": torch.trunc,
    "gammaln": torch.lgamma,
    "identity": torch.clone,
    "logical_not": torch.logical_not,
    "negative": torch.neg,
    "rint": torch.round,
    "round": torch.round,
    "softrelu": functional.softplus,
    "softsign": functional.softsign,
    "stop_gradient": torch.detach,
}


def _with_tensors(function: Function) -> Function:
    """Return a binary function that also takes numbers, which torch's own does not."""

    @functools.wraps(function)
    def call(lhs: Any, rhs: Any) -> Tensor:
        like = lhs if isinstance(lhs, Tensor) else rhs
        lhs, rhs = (
            one if isinstance(one, Tensor) else torch.as_tensor(one, device=like.device)
            for one in (lhs, rhs)
        )
        return function(lhs, rhs)  # type: ignore[no-any-return]

    return call


ARITHMETIC: dict[str, Function] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "true_divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "mod": operator.mod,
    "power": operator.pow,
    "matmul": operator.matmul,
    "maximum": _with_tensors(torch.maximum),
    "minimum": _with_tensors(torch.minimum),
    "hypot": _with_tensors(torch.hypot),
}
COMPARISONS: dict[str, Function] = {
    "equal": operator.eq,
    "not_equal": operator.ne,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "lesser": operator.lt,
    "lesser_equal": operator.le,
    "logical_and": _with_tensors(torch.logical_and),
    "logical_or": _with_tensors(torch.logical_or),
    "logical_xor": _with_tensors(torch.logical_xor),
}
_SHORT = {"subtract": "sub", "multiply": "mul", "divide": "div", "mod": "mod"}


def _unary(function: Function) -> Function:
    @functools.wraps(function)
    def call(data: Tensor) -> Tensor:
        return function(data)  # type: ignore[no-any-return]

    return call


def _in_floats(function: Function) -> Function:
    """Return a comparison whose result has the dtype of its operands, as in `nd`."""

    @functools.wraps(function)
    def call(lhs: Any, rhs: Any) -> Tensor:
        like = lhs if isinstance(lhs, Tensor) else rhs
        return function(lhs, rhs).to(like.dtype)  # type: ignore[no-any-return]

    return call


def clip(data: Tensor, a_min: float | None = None, a_max: float | None = None) -> Tensor:
    """Return the elements, limited to the range from `a_min` to `a_max`."""
    return torch.clamp(data, a_min, a_max)


def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """Return the elements of `x` where the condition is not 0, elsewhere those of `y`."""
    return torch.where(condition.to(torch.bool), x, y)


def astype(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a different dtype."""
    return data.to(dtype, copy=True)


def smooth_l1(data: Tensor, scalar: float = 1.0) -> Tensor:
    """Return the smooth L1 loss of every element (Girshick, Fast R-CNN, 2015)."""
    square = scalar * scalar
    small = data.abs() < 1 / square
    return torch.where(small, 0.5 * square * data * data, data.abs() - 0.5 / square)


UNARY: dict[str, Function] = {name: _unary(getattr(torch, name)) for name in _SAME_NAME.split()}
UNARY |= {name: _unary(function) for name, function in _OTHER_NAME.items()}

COMMON: dict[str, Function] = {
    **UNARY,
    **ARITHMETIC,
    "astype": astype,
    "cast": astype,
    "clip": clip,
    "ones_like": _unary(torch.ones_like),
    "smooth_l1": smooth_l1,
    "where": where,
    "zeros_like": _unary(torch.zeros_like),
}

ND: dict[str, Function] = {
    **COMMON,
    **{name: _in_floats(function) for name, function in COMPARISONS.items()},
}
ND |= {
    f"{prefix}_{_SHORT.get(name, name)}": ND[name]
    for prefix in ("broadcast", "elemwise")
    for name in (*ARITHMETIC, *COMPARISONS)
}

NP: dict[str, Function] = {**COMMON, **COMPARISONS, "less": operator.lt, "less_equal": operator.le}
NP |= {"absolute": UNARY["abs"], "fabs": UNARY["abs"]}
