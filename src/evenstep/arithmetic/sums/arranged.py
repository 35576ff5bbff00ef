"""Tensors as arrays whose terms are in the order of a sum."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

Dims = Sequence[int] | int | None


class Arrangement(NamedTuple):
    """How a tensor is made a contiguous array of `outer` × n × `inner` elements, reduced over n.

    Where `pieces` is not 1, the array is `pieces` × `outer` × n instead, reduced over both ends.
    """

    order: tuple[int, ...] | None
    """The tensor's dimensions in the array's order; None if that is the tensor's own."""
    outer: int
    pieces: int
    n: int
    inner: int
    shape: tuple[int, ...]
    """The shape in which the array's results are written."""
    back: tuple[int, ...] | None
    """The order in which the results' dimensions are those of the tensor; None if they are."""
    final: tuple[int, ...]
    """The result's shape."""

    def array(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the array; it is copied only if its memory has a different order."""
        return (x if self.order is None else x.permute(self.order)).contiguous()

    def finished(self, results: torch.Tensor) -> torch.Tensor:
        """Return results in the order and the shape of the tensor."""
        if self.back is None:
            return results
        return results.permute(self.back).contiguous().view(self.final)


def arrangement(
    x: torch.Tensor, dim: Dims, keepdim: bool = False, *, rows: bool = False
) -> Arrangement:
    """Arrange a tensor so that terms are in row-major order of the reduced dimensions.

    A tensor that is dense in a different order of its dimensions (transposed, channels-last) is
    not copied if that order keeps the reduced ones ascending.

    Args:
        x: the tensor.
        dim: its reduced dimensions; None and [] mean all.
        keepdim: whether the result keeps them, with size 1.
        rows: whether `pieces` and `inner` must be 1.

    Raises:
        IndexError: there is no such dimension.
        RuntimeError: a dimension was given twice.
    """
    if dim is not None:
        dim = (dim,) if isinstance(dim, int) else tuple(dim)
    return _arrangement(x.shape, x.stride(), dim or None, keepdim, rows)


def dims_of(ndim: int, dims: Sequence[int] | None) -> list[int]:
    """Return dimensions counted from the first, ascending; None means all.

    Raises:
        IndexError: there is no such dimension.
        RuntimeError: a dimension was given twice.
    """
    if dims is None:
        return list(range(ndim))
    bound = max(ndim, 1)
    for one in dims:
        if not -bound <= one < bound:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but "
                f"got {one})"
            )
    found = sorted({one % bound for one in dims})
    if len(found) < len(dims):
        raise RuntimeError(f"a dim appears multiple times in the list of dims {list(dims)}")
    return found if ndim else []


def sizes_around(x: torch.Tensor, dim: int) -> tuple[int, int, int]:
    """Return the number of elements before a dimension, along it, and behind it."""
    return _sizes_around(x.shape, dim)


@functools.lru_cache(maxsize=4096)
def _sizes_around(sizes: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    if not dims_of(len(sizes), (dim,)):
        return 1, 1, 1
    at = dim % len(sizes)
    return math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])


@functools.lru_cache(maxsize=4096)
def _arrangement(
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dims: tuple[int, ...] | None,
    keepdim: bool,
    rows: bool,
) -> Arrangement:
    reduced = dims_of(len(sizes), dims)
    order, places = _memory_order(sizes, strides, reduced)
    ndim = len(order)
    is_between = places[:1] == [0] and places[-1:] == [ndim - 1] and _gaps(places) == 1
    if _gaps(places) > (is_between and not rows) or (rows and places[-1:] != [ndim - 1]):
        kept = [place for place in range(ndim) if place not in places]
        order = [order[place] for place in (*kept, *places)]
        places = list(range(len(kept), ndim))
    kept = [place for place in range(ndim) if place not in places]
    ones = [1 if dim in reduced else size for dim, size in enumerate(sizes)]
    final = tuple(ones if keepdim else (sizes[dim] for dim in range(ndim) if dim not in reduced))
    own = [order[place] for place in kept]
    moved = None
    if own != sorted(own):
        back = sorted(range(ndim), key=order.__getitem__)
        moved = tuple(ones[dim] for dim in order), tuple(back)
    outer, pieces, n, inner = map(math.prod, _parts([sizes[dim] for dim in order], places))
    return Arrangement(
        tuple(order) if order != sorted(order) else None,
        *(outer, pieces, n, inner),
        moved[0] if moved else final,
        moved[1] if moved else None,
        final,
    )


def _parts(sizes: Sequence[int], places: Sequence[int]) -> tuple[Sequence[int], ...]:
    """Return the sizes of which `outer`, `pieces`, n and `inner` are the products."""
    if not places:
        return sizes, [], [], []
    first, last = places[0], places[-1]
    if not _gaps(places):
        return sizes[:first], [], sizes[first : last + 1], sizes[last + 1 :]
    kept = [place for place in range(len(sizes)) if place not in places]
    return sizes[kept[0] : kept[-1] + 1], sizes[: kept[0]], sizes[kept[-1] + 1 :], []


def _gaps(places: Sequence[int]) -> int:
    """Return how often ascending numbers leave some out."""
    return sum(one + 1 != after for one, after in itertools.pairwise(places))


def _memory_order(
    sizes: Sequence[int], strides: Sequence[int], reduced: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the dimensions in the order of memory, if that is dense, and the reduced ones there.

    If it isn't, or the reduced dimensions wouldn't be ascending, the order is the tensor's own.
    """
    own = list(range(len(sizes)))
    order = sorted(own, key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return own, list(reduced)
        step *= sizes[dim]
    places = [order.index(dim) for dim in reduced]
    return (order, places) if places == sorted(places) else (own, list(reduced))
