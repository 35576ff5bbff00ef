"""Sums of rows by index: gradients of embeddings, gathers and scatters.

Numbers that go to one place are added to what is there, one after the other, in the row-major order
of the index. Of several that are put to one place, the last stays.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from evenstep.arithmetic.arrays import Scalar, is_float32
from evenstep.arithmetic.native import Function, scratch
from evenstep.arithmetic.operations import kernel

aten = torch.ops.aten

_add_rows = Function("add_rows", "llllplplpp")
_add_elements = Function("add_elements", "llllpppp")

NOWHERE = -(2**63)  # no place
_ONE_THREAD = 32768  # numbers: torch's own kernels put fewer one after the other

Indices = Sequence[torch.Tensor | None]


def add_rows(
    out: torch.Tensor,
    at: torch.Tensor,
    rows: torch.Tensor,
    *,
    blocks: int = 1,
    skipped: int = NOWHERE,
) -> torch.Tensor:
    """Add rows to places of `out`, in order, and return it.

    Args:
        out: shape `[blocks · depth, length]`, contiguous.
        at: places below depth, integers; shape `[n]`, the same for all blocks, or `[blocks · n]`.
        rows: shape `[blocks · n, length]`.
        blocks: how many times there are n rows for depth places.
        skipped: rows for this place are left out; by default, none are.

    Raises:
        IndexError: a place is negative or not below depth; the other rows have been added.
        RuntimeError: the places are no integers, or the rows are more, fewer or longer than needed.
    """
    assert out.is_contiguous()
    n, length = len(rows) // max(blocks, 1), rows.shape[1]
    if at.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"Expected dtype int32/int64 for index, but got {at.dtype}")
    fits = len(at) in (n, blocks * n) or not blocks
    if not fits or (len(rows), out.shape[1]) != (blocks * n, length):
        raise RuntimeError(
            f"{len(at)} places for {len(rows)} rows of {length} numbers, to be added to "
            f"{len(out)} rows of {out.shape[1]}"
        )
    if rows.numel() == 0:
        return out
    depth = len(out) // blocks
    at, rows = at.to(torch.int64).contiguous(), rows.contiguous()
    step = 0 if len(at) == n else n
    wrong = scratch(2)
    _add_rows(
        *(blocks, n, depth, length, at.data_ptr(), step, rows.data_ptr()),
        *(skipped, out.data_ptr(), wrong),
    )
    _check(wrong, depth)
    return out


def add_elements(
    out: torch.Tensor, at: torch.Tensor, values: torch.Tensor, *, blocks: int, length: int
) -> None:
    """Add numbers to places of `out`, in order.

    Args:
        out: in memory `[blocks, depth, length]`.
        at: the place below depth of each number, int64; in memory `[blocks, n, length]`.
        values: the numbers, in memory as `at`.
        blocks: how many times there are n numbers for depth places.
        length: how many numbers lie side by side, each with places of its own.

    Raises:
        IndexError: a place is negative or not below depth; the other rows have been added.
    """
    n, depth = (one.numel() // (blocks * length) for one in (at, out))
    wrong = scratch(2)
    _add_elements(
        *(blocks, n, depth, length, at.data_ptr(), values.data_ptr(), out.data_ptr(), wrong)
    )
    _check(wrong, depth)


def _check(wrong: int, depth: int) -> None:
    count = ctypes.c_int64.from_address(wrong).value
    if count:
        raise IndexError(f"{count} of the places are out of bounds for dimension of size {depth}")


def _changed(target: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the values of a target: itself, if it is contiguous."""
    return target if target.is_contiguous() else target.contiguous()


def _stored(target: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    return target if changed is target else target.copy_(changed)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- rows of a dimension


@kernel("index_add_")
def index_add_(
    target: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: Scalar = 1,
) -> torch.Tensor:
    """Add alpha · source, rounded, to the slices of a dimension that the index names, in place."""
    if not is_float32(target, source):
        return NotImplemented
    if target.ndim == 0:
        index_add_(target.view(1), 0, index, source.view(1), alpha=alpha)
        return target
    dim = _dim(target, dim)
    if index.ndim > 1:
        raise IndexError(f"index_add_: the index has {index.ndim} dimensions, and may have 1")
    if source.shape != (*target.shape[:dim], index.numel(), *target.shape[dim + 1 :]):
        raise RuntimeError(
            f"index_add_ of {index.numel()} slices along dimension {dim}: source has shape "
            f"{tuple(source.shape)}, self has {tuple(target.shape)}"
        )
    if alpha != 1:
        source = source * alpha
    changed = _changed(target)
    blocks, length = math.prod(target.shape[:dim]), math.prod(target.shape[dim + 1 :])
    if changed.numel():
        places = index.reshape(-1)
        add_rows(changed.view(-1, length), places, source.reshape(-1, length), blocks=blocks)
    return _stored(target, changed)


@kernel("scatter_add_")
def scatter_add_(
    target: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor
) -> torch.Tensor:
    """Add each number of `src` to the place along a dimension that the index names, in place."""
    if not is_float32(target, src):
        return NotImplemented
    if target.ndim == 0:
        scatter_add_(target.view(1), 0, index.view(-1), src.view(-1))
        return target
    if index.numel() == 0:
        return target
    dim = _dim(target, dim)
    if not target.ndim == max(index.ndim, 1) == max(src.ndim, 1):
        raise RuntimeError(
            f"scatter_add_: self, index and src have {target.ndim}, {index.ndim} and {src.ndim} "
            f"dimensions, and must have the same number"
        )
    index, src = (one if one.ndim else one.view(1) for one in (index, src))
    if _is_of_rows(target, dim, index):
        return _add_rows_along(target, dim, index, src)
    # The part of the target that the index covers, with the dimension last.
    part = target
    for axis, size in enumerate(index.shape):
        src = src.narrow(axis, 0, size)
        if axis != dim:
            part = part.narrow(axis, 0, size)
    part = part.movedim(dim, -1)
    changed = _changed(part)
    places = index.movedim(dim, -1).reshape(-1)
    values = src.movedim(dim, -1).reshape(-1, 1)
    add_rows(changed.view(-1, 1), places, values, blocks=changed.numel() // changed.shape[-1])
    _stored(part, changed)
    return target


def _dim(target: torch.Tensor, dim: int) -> int:
    """Return a dimension counted from the first."""
    target.size(dim)  # raises torch's error if there is no such dimension
    return dim % target.ndim


def _is_of_rows(target: torch.Tensor, dim: int, index: torch.Tensor) -> bool:
    """Whether an index is an expanded one, with the same place for all numbers of a row."""
    same = all(
        stride == 0 or size == 1
        for stride, size in zip(index.stride()[dim + 1 :], index.shape[dim + 1 :], strict=True)
    )
    return same and dim + 1 < target.ndim and _others(index, dim) == _others(target, dim)


def _others(tensor: torch.Tensor, dim: int) -> list[int]:
    return [size for axis, size in enumerate(tensor.shape) if axis != dim]


def _add_rows_along(
    target: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor
) -> torch.Tensor:
    rows = src
    for axis, size in enumerate(index.shape):
        rows = rows.narrow(axis, 0, size)
    places = index.flatten(dim + 1)[..., 0].reshape(-1)
    changed = _changed(target)
    length, blocks = math.prod(target.shape[dim + 1 :]), math.prod(target.shape[:dim])
    add_rows(changed.view(-1, length), places, rows.reshape(-1, length), blocks=blocks)
    return _stored(target, changed)


def _of_a_copy(in_place: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that changes a contiguous copy of its first argument, and returns it."""
    return lambda base, *args, **options: in_place(_copied(base), *args, **options)


scatter_add = _of_a_copy(scatter_add_)
kernel("scatter_add")(scatter_add)
kernel("index_add")(_of_a_copy(index_add_))


@kernel("scatter.reduce")
def scatter_with(
    base: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, *, reduce: str
) -> torch.Tensor:
    """Return scatter_add, for reduce="add"."""
    return scatter_add(base, dim, index, src) if reduce == "add" else NotImplemented


@kernel("scatter.value_reduce")
def scatter_value_with(
    base: torch.Tensor, dim: int, index: torch.Tensor, value: Scalar, *, reduce: str
) -> torch.Tensor:
    """Return base with a value added to each place that the index names, for reduce="add"."""
    if reduce != "add" or not is_float32(base):
        return NotImplemented
    return scatter_add(base, dim, index, torch.full(index.shape, value, dtype=base.dtype))


@kernel("scatter_reduce.two")
def scatter_reduce(
    base: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """Return sums or means of numbers with the same place, in the order of the index.

    They begin with what is there, or with 0 where include_self is False. A mean is a sum divided by
    the count. Places that the index does not name keep what is there.
    """
    if reduce not in ("sum", "mean") or not is_float32(base, src):
        return NotImplemented
    start = base if include_self else base.scatter(dim, index, 0.0)
    result = scatter_add(start, dim, index, src)
    if reduce == "mean":
        counts = torch.full(base.shape, float(include_self), dtype=base.dtype)
        counts = scatter_value_with(counts, dim, index, 1.0, reduce="add")
        result.div_(counts.clamp_(min=1))
    return result


@kernel("index_copy_")
def index_copy_(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """Put slices to the places along a dimension that the index names, in place."""
    fits = index.ndim == 1 and source.ndim == target.ndim and source.shape[dim] == len(index)
    if source.numel() < _ONE_THREAD or not fits:
        return aten.index_copy_.default(target, dim, index, source)
    at = index.view([-1 if axis == _dim(target, dim) else 1 for axis in range(target.ndim)])
    return target.scatter_(dim, at.expand(source.shape), source)


kernel("index_copy")(_of_a_copy(index_copy_))


# ---- places of a tensor


@kernel("put_")
def put_(
    target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Add numbers to places of a flattened tensor, in place, or put them there."""
    if not accumulate and source.numel() < _ONE_THREAD:
        return aten.put_.default(target, index, source)
    if accumulate and not is_float32(target, source):
        return NotImplemented
    changed = _changed(target)
    places = _from_start(index.reshape(-1), target.numel())
    (add_rows if accumulate else _put_rows)(changed.view(-1, 1), places, source.reshape(-1, 1))
    return _stored(target, changed)


@kernel("_index_put_impl_", "index_put_")
def index_put_(
    target: torch.Tensor,
    indices: Indices,
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    """Add values to the elements that indices name, in place, or put them there."""
    if not accumulate and _is_put_in_order(target, indices, values):
        return aten.index_put_.default(target, indices, values)
    if accumulate and not is_float32(target, values):
        return NotImplemented
    given = _without_masks(target, indices)
    axes = [axis for axis, index in enumerate(given) if index is not None]
    chosen = torch.broadcast_tensors(*(given[axis] for axis in axes))
    behind = [axis for axis in range(target.ndim) if axis not in axes]
    part = target.permute(*axes, *behind)
    changed = _changed(part)
    length = math.prod(target.shape[axis] for axis in behind)
    rows = _rows(values, target, axes, chosen[0].shape).reshape(-1, length)
    if changed.numel():
        places = _places(chosen, [target.shape[axis] for axis in axes])
        (add_rows if accumulate else _put_rows)(changed.view(-1, length), places, rows)
    elif rows.numel():
        raise IndexError("index is out of bounds for dimension with size 0")
    _stored(part, changed)
    return target


kernel("put")(_of_a_copy(put_))
kernel("_index_put_impl", "index_put")(_of_a_copy(index_put_))


def _is_put_in_order(target: torch.Tensor, indices: Indices, values: torch.Tensor) -> bool:
    """Whether torch's own kernel puts numbers one after the other, or no two to one place."""
    given = [index for index in indices if index is not None]
    kinds = {one.dtype for one in given}
    if values.dtype is not target.dtype or kinds & {torch.bool, torch.uint8}:
        return True
    try:
        shape = torch.broadcast_shapes(*(index.shape for index in given))
    except RuntimeError:  # torch's kernel raises its own error
        return True
    behind = [n for n, i in itertools.zip_longest(target.shape, indices) if i is None]
    return math.prod(shape) * math.prod(behind) < _ONE_THREAD


def _put_rows(out: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    """Put rows to places of `out`: of those for one place, the last.

    Raises:
        IndexError: a place is negative or not below the number of rows.
    """
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < len(out):
        raise IndexError(f"an index is out of bounds for dimension of size {len(out)}")
    out.scatter_(0, at.view(-1, 1).expand(rows.shape), rows)


def _without_masks(target: torch.Tensor, indices: Indices) -> list[torch.Tensor | None]:
    """Return indices with masks replaced by the places where they are true.

    Raises:
        IndexError: a mask doesn't have the shape of the dimensions that it stands for.
    """
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            first = len(found)
            if target.shape[first : first + index.ndim] != index.shape:
                raise IndexError(
                    f"a mask of shape {tuple(index.shape)} at dimension {first} of a tensor of "
                    f"shape {tuple(target.shape)}"
                )
            found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


def _rows(
    values: torch.Tensor, target: torch.Tensor, axes: Sequence[int], shape: torch.Size
) -> torch.Tensor:
    """Return values with the dimensions of the index first.

    They stand in the place of the indexed dimensions if these are neighbours, else in front.
    """
    first = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
    rest = [size for axis, size in enumerate(target.shape) if axis not in axes]
    whole = values.expand(*rest[:first], *shape, *rest[first:])
    order = [*range(first, first + len(shape)), *range(first)]
    return whole.permute(*order, *range(len(order), whole.ndim))


def _places(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the places in row-major order of indices of several dimensions."""
    places = _from_start(indices[0], sizes[0])
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        index = _from_start(index, size)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise IndexError(f"index is out of bounds for dimension with size {size}")
        places = places * size + index
    return places.reshape(-1)


def _from_start(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return places counted from the start, where negative ones are counted from the end."""
    return torch.where(index < 0, index + size, index)
