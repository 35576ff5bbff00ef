"""Functions that combine elements along axes: sums, extremes, norms, products of matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Axis: TypeAlias = "int | Sequence[int] | None"
Function: TypeAlias = Callable[..., Any]


def _axes(data: Tensor, axis: Axis, exclude: bool = False) -> list[int]:
    """Return the axes to reduce as positive numbers; None stands for all of them."""
    named = range(data.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    chosen = [one % data.ndim for one in named]
    return [one for one in range(data.ndim) if one not in chosen] if exclude else chosen


def _reduction(function: Function) -> Function:
    """Return a reduction with MXNet's arguments over torch's `function(data, dims, keepdim)`."""

    @functools.wraps(function)
    def call(data: Tensor, axis: Axis = None, keepdims: bool = False, exclude: bool = False) -> Any:
        if not data.ndim:
            return data.clone()
        return function(data, _axes(data, axis, exclude), keepdims)

    return call


def _prod(data: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    for dim in sorted(dims, reverse=True):
        data = data.prod(dim, keepdim)
    return data


def _mean(data: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    floating = data if data.is_floating_point() else data.to(torch.float32)
    return floating.mean(dims, keepdim)


def _sum(data: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return data.sum(dims, keepdim, dtype=None if data.dtype == torch.bool else data.dtype)


def _spread(root: bool) -> Function:
    def call(data: Tensor, axis: Axis = None, ddof: int = 0, keepdims: bool = False) -> Tensor:
        dims = _axes(data, axis)
        found = torch.var(data, dims, correction=ddof, keepdim=keepdims)
        return found.sqrt() if root else found

    return call


def norm(data: Tensor, ord: int = 2, axis: Axis = None, keepdims: bool = False) -> Tensor:  # noqa: A002
    """Return the norm of order `ord` along the axes (None: of all elements)."""
    found: Tensor = torch.linalg.vector_norm(data, ord, _axes(data, axis), keepdims)
    return found


def _position(function: Function, dtype: torch.dtype) -> Function:
    @functools.wraps(function)
    def call(data: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
        return function(data, axis, keepdims).to(dtype)  # type: ignore[no-any-return]

    return call


def dot(lhs: Tensor, rhs: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Return the product over the last axis of `lhs` and the first axis of `rhs`."""
    left = lhs.movedim(0, -1) if transpose_a else lhs
    right = rhs.movedim(-1, 0) if transpose_b else rhs
    if left.ndim == 2 and right.ndim in (1, 2):
        return torch.matmul(left, right)
    found: Tensor = torch.tensordot(left, right, 1)
    return found


def np_dot(a: Tensor, b: Any) -> Tensor:
    """Return numpy's `dot`: the product over the last axis of `a` and the last but one of `b`."""
    if not isinstance(b, Tensor) or not b.ndim or not a.ndim:
        return torch.mul(a, b)
    found: Tensor = torch.tensordot(a, b, ([a.ndim - 1], [max(0, b.ndim - 2)]))
    return found


def batch_dot(
    lhs: Tensor, rhs: Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """Return the products of two batches of matrices."""
    left = lhs.transpose(1, 2) if transpose_a else lhs
    return torch.bmm(left, rhs.transpose(1, 2) if transpose_b else rhs)


def _topk(
    data: Tensor, axis: int = -1, k: int = 1, ret_typ: str = "indices", is_ascend: bool = False
) -> Any:
    values, places = torch.topk(data, k, axis, largest=not is_ascend)
    indices = places.to(torch.float32)
    return {"indices": indices, "value": values, "both": (values, indices)}[ret_typ]


def _sorted(data: Tensor, axis: int = -1, is_ascend: bool = True) -> Tensor:
    return data.sort(axis, descending=not is_ascend).values


def _order(dtype: torch.dtype) -> Function:
    def call(data: Tensor, axis: int = -1, is_ascend: bool = True) -> Tensor:
        return data.argsort(axis, descending=not is_ascend).to(dtype)

    return call


def _cumsum(a: Tensor, axis: int | None = None) -> Tensor:
    return a.flatten().cumsum(0) if axis is None else a.cumsum(axis)


COMMON: dict[str, Function] = {
    "sum": _reduction(_sum),
    "mean": _reduction(_mean),
    "prod": _reduction(_prod),
    "max": _reduction(torch.amax),
    "min": _reduction(torch.amin),
    "cumsum": _cumsum,
    "batch_dot": batch_dot,
    "topk": _topk,
    "sort": _sorted,
}
ND: dict[str, Function] = {
    **COMMON,
    "dot": dot,
    "norm": norm,
    "argmax": _position(torch.argmax, torch.float32),
    "argmin": _position(torch.argmin, torch.float32),
    "argsort": _order(torch.float32),
    "sum_axis": COMMON["sum"],
}
NP: dict[str, Function] = {
    **COMMON,
    "dot": np_dot,
    "tensordot": lambda a, b, axes=2: torch.tensordot(a, b, axes),
    "einsum": lambda subscripts, *operands: torch.einsum(subscripts, *operands),
    "outer": torch.outer,
    "argmax": _position(torch.argmax, torch.int64),
    "argmin": _position(torch.argmin, torch.int64),
    "argsort": _order(torch.int64),
    "std": _spread(root=True),
    "var": _spread(root=False),
    "all": _reduction(lambda data, dims, keepdim: torch.all(data, tuple(dims), keepdim)),
    "any": _reduction(lambda data, dims, keepdim: torch.any(data, tuple(dims), keepdim)),
}
