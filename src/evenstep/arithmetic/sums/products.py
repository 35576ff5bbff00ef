"""Products of matrices and vectors.

Each element of a product is one chain of fused multiply-adds over k, ascending, that begins with
+0: sum = fma(a[i, k], b[k, j], sum). Where a formula has alpha, beta and an addend, the result is
fma(beta, addend, alpha · product), which for alpha = beta = 1 is one addition; beta = 0 leaves the
addend out. Alpha and beta are rounded to float32.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Callable, Sequence

import torch

from evenstep.arithmetic.arrays import Scalar, is_float32
from evenstep.arithmetic.native import Function, scratch
from evenstep.arithmetic.operations import kernel

aten = torch.ops.aten

SCRATCH = 1 << 19
"""Floats of working memory of any product: MULTIPLY_SCRATCH in `c/products.h`."""

_multiply_matrices = Function("multiply_matrices", "pppppffp")

Shape = tuple[int, ...]


@kernel("mm")
def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices."""
    return _checked(torch.mm, 2, a, b)


@kernel("bmm")
def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of each pair of matrices."""
    return _checked(torch.bmm, 3, a, b)


@kernel("addmm")
def addmm(
    addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> torch.Tensor:
    """Return fma(beta, addend, alpha · a b)."""
    return _checked(torch.addmm, 2, a, b, addend, beta, alpha)


@kernel("baddbmm")
def baddbmm(
    addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> torch.Tensor:
    """Return fma(beta, addend, alpha · a b) for each pair of matrices."""
    return _checked(torch.baddbmm, 3, a, b, addend, beta, alpha)


@kernel("addbmm")
def addbmm(
    addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> torch.Tensor:
    """Return fma(beta, addend, alpha · the sum of all products): one chain over (batch, k)."""
    if len(a) == len(b) == 0:
        a, b = a.new_zeros((1, *a.shape[1:])), b.new_zeros((1, *b.shape[1:]))
    return _checked(torch.addbmm, 3, a, b, addend, beta, alpha, is_one=True)


@kernel("_addmm_activation")
def _addmm_activation(
    addend: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    use_gelu: bool = False,
) -> torch.Tensor:
    """Return relu(fma(beta, addend, alpha · a b)); GELU is refused."""
    if use_gelu or not is_float32(addend, a, b):
        return NotImplemented
    return torch.relu_(addmm(addend, a, b, beta=beta, alpha=alpha))


@kernel("mv")
def mv(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the product of a matrix and a vector."""
    if not is_float32(a, x):
        return NotImplemented
    out = _product(2, x[None], a.t()) if a.ndim == 2 and x.ndim == 1 else None
    return torch.mv(a, x) if out is None else out[0]


@kernel("addmv")
def addmv(
    addend: torch.Tensor, a: torch.Tensor, x: torch.Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> torch.Tensor:
    """Return fma(beta, addend, alpha · a x)."""
    if not is_float32(addend, a, x):
        return NotImplemented
    fits = a.ndim == 2 and x.ndim == 1 and addend.ndim < 2
    out = _product(2, x[None], a.t(), addend, beta, alpha) if fits else None
    return torch.addmv(addend, a, x, beta=beta, alpha=alpha) if out is None else out[0]


@kernel("addr")
def addr(
    addend: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> torch.Tensor:
    """Return fma(beta, addend, alpha · (x[i] · y[j] + 0)): the product with a depth of 1."""
    if not is_float32(addend, x, y):
        return NotImplemented
    fits = x.ndim == y.ndim == 1
    out = _product(2, x[:, None], y[None], addend, beta, alpha) if fits else None
    return torch.addr(addend, x, y, beta=beta, alpha=alpha) if out is None else out


@kernel("dot", "vdot")
def dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the product of two vectors."""
    if not is_float32(x, y):
        return NotImplemented
    out = _product(2, x[None], y[:, None]) if x.ndim == y.ndim == 1 else None
    return torch.dot(x, y) if out is None else out[0, 0]


def _checked(
    instead: Callable[..., torch.Tensor],
    axes: int,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    *,
    is_one: bool = False,
) -> torch.Tensor:
    """Return a product as `_product`, or raise the error of `instead`, torch's own function."""
    if not is_float32(a, b, addend):
        return NotImplemented
    out = _product(axes, a, b, addend, beta, alpha, is_one=is_one)
    if out is not None:
        return out
    return instead(a, b) if addend is None else instead(addend, a, b, beta=beta, alpha=alpha)


def _product(
    axes: int,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: Scalar = 1,
    alpha: Scalar = 1,
    *,
    is_one: bool = False,
) -> torch.Tensor | None:
    """Return a product, contiguous; None if the shapes don't fit, so that torch raises its error.

    Args:
        axes: of how many axes `a` and `b` must be: 2 for matrices, 3 for batches of them.
        a: the left operand.
        b: the right operand.
        addend: what to add, scaled by beta, of a shape that broadcasts; None for nothing.
        beta: the addend's factor; 0 leaves it out.
        alpha: the product's factor.
        is_one: whether all products of the batch are added to one.
    """
    if addend is None:
        found = _matrices(axes, is_one, a.shape, a.stride(), b.shape, b.stride())
    else:
        of_addend = (addend.shape, addend.stride())
        found = _matrices(axes, is_one, a.shape, a.stride(), b.shape, b.stride(), *of_addend)
    return None if found is None else _multiplied(found, a, b, addend, beta, alpha)


def product_as(
    a: torch.Tensor,
    a_as: tuple[Shape, Shape],
    b: torch.Tensor,
    b_as: tuple[Shape, Shape],
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a product of matrices, or of batches of them, and an addend.

    Args:
        a: where the left operand lies in memory.
        a_as: its shape and strides there.
        b: where the right operand lies.
        b_as: its shape and strides there.
        addend: what to add, of a shape that broadcasts; None for nothing.
    """
    of_addend = () if addend is None else (addend.shape, addend.stride())
    found = _matrices(len(a_as[0]), False, *a_as, *b_as, *of_addend)
    assert found is not None
    return _multiplied(found, a, b, addend, 1, 1)


def _multiplied(
    found: _Matrices,
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None,
    beta: Scalar,
    alpha: Scalar,
) -> torch.Tensor:
    out = a.new_empty(found.shape)
    if found.has_elements:
        added = 0 if addend is None or beta == 0 else addend.data_ptr()
        addresses = (a.data_ptr(), b.data_ptr(), added, out.data_ptr())
        _multiply_matrices(found.address, *addresses, alpha, beta, scratch(found.floats))
    return out


class _Matrices:
    """What C needs to know about a product: `struct matrices` of `c/products.c`."""

    __slots__ = ("_values", "address", "floats", "has_elements", "shape")

    def __init__(self, shape: Shape, values: Sequence[int]) -> None:
        self.shape = shape
        self.has_elements = 0 not in shape
        self._values = array.array("l", values)
        self.address = self._values.buffer_info()[0]
        _, rows, columns, depth = values[:4]
        self.floats = SCRATCH + 4 * (rows + columns + depth)


@functools.lru_cache(maxsize=4096)
def _matrices(
    axes: int,
    is_one: bool,
    a: Shape,
    a_strides: Shape,
    b: Shape,
    b_strides: Shape,
    addend: Shape = (),
    addend_strides: Shape = (),
) -> _Matrices | None:
    """Return the description of a product of arrays; None if their shapes don't fit."""
    if len(a) != axes or len(b) != axes or a[-1] != b[-2] or a[:-2] != b[:-2]:
        return None
    shape = (a[-2], b[-1]) if is_one else (*a[:-1], b[-1])
    missing = len(shape) - len(addend)
    if missing < 0 or any(
        size not in (1, out) for size, out in zip(addend, shape[missing:], strict=True)
    ):
        return None
    kept = [0 if size == 1 else stride for size, stride in zip(addend, addend_strides, strict=True)]
    batch = a[0] if axes == 3 else 1
    values = [batch, a[-2], b[-1], a[-1]]
    for strides in (a_strides, b_strides, kept):
        values += [0] * (3 - len(strides)) + list(strides)
    return _Matrices(shape, [*values, is_one])
