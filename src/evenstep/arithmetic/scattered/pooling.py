"""Average pooling, and the gradients of maximum pooling."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, cast

import torch

from evenstep.arithmetic.arrays import is_float32, layout_of
from evenstep.arithmetic.native import Function, scratch
from evenstep.arithmetic.operations import kernel
from evenstep.arithmetic.scattered.indexing import add_elements, add_rows

_box_means = Function("box_means", "llpppppp")
_box_gradients = Function("box_gradients", "llpppppp")


class Boxes(NamedTuple):
    """Where the boxes of a pooled volume lie, and what their sums are divided by."""

    sizes: tuple[int, ...]  # of the result, without planes
    shape: torch.Tensor  # depth, height and width, before and after
    edges: torch.Tensor  # of each axis in turn: the first number, and the one behind the last
    divisors: torch.Tensor


def boxes_of(
    before: Sequence[int], axes: Sequence[list[tuple[int, int]]], divisors: list[float]
) -> Boxes:
    """Return boxes from the sizes of a volume, the boxes of each axis, and what they divide by."""
    missing = 3 - len(before)
    sizes = tuple(map(len, axes))
    whole = [[(0, 1)]] * missing + list(axes)
    edges = [edge for axis in whole for box in axis for edge in box]
    return Boxes(
        sizes,
        torch.tensor([*[1] * missing, *before, *[1] * missing, *sizes]),
        torch.tensor(edges),
        torch.tensor(divisors, dtype=torch.float32),
    )


@functools.lru_cache(maxsize=256)
def _windows(
    before: tuple[int, ...],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Boxes:
    """Return the boxes of windows of one size."""
    axes, widths = [], []
    for size, k, s, p in zip(before, kernel_size, stride, padding, strict=True):
        count = _count(size, k, s, p, ceil_mode)
        starts = [at * s - p for at in range(count)]
        boxes = [(max(start, 0), min(start + k, size)) for start in starts]
        padded = [min(start + k, size + p) - start for start in starts]
        axes.append(boxes)
        widths.append(padded if count_include_pad else [end - begin for begin, end in boxes])
    return boxes_of(before, axes, [float(divisor or math.prod(one)) for one in product(*widths)])


def _count(size: int, k: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Return the number of windows along an axis: none begins in the padding behind."""
    if not (0 <= padding <= k // 2 and k > 0 and stride > 0):
        raise RuntimeError(
            f"pad should be at most half of effective kernel size, but got padding {padding}, "
            f"kernel_size {k} and stride {stride}"
        )
    count = (size + 2 * padding - k + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    if count < 1:
        raise RuntimeError(f"pooling {size} numbers with kernel_size {k}: the output is too small")
    return count


@functools.lru_cache(maxsize=256)
def _parts(before: tuple[int, ...], after: tuple[int, ...]) -> Boxes:
    """Return the boxes of adaptive pooling: box i of n is ⌊i m / n⌋ to ⌈(i + 1) m / n⌉ of m."""
    axes = [
        [(at * size // count, -((at + 1) * size // -count)) for at in range(count)]
        for size, count in zip(before, after, strict=True)
    ]
    widths = [[end - begin for begin, end in axis] for axis in axes]
    return boxes_of(before, axes, [float(math.prod(one)) for one in product(*widths)])


def arranged(tensor: torch.Tensor, ndim: int) -> tuple[torch.Tensor, int]:
    """Return a dense tensor, and how many of its channels lie together in memory: 1 or all."""
    layout = layout_of(tensor)
    together = layout is not torch.contiguous_format and tensor.ndim == ndim + 2
    return tensor.contiguous(memory_format=layout), tensor.shape[1] if together else 1


def means(values: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Return the sums of boxes, columns first, divided by what they are divided by."""
    ndim = len(boxes.sizes)
    values, channels = arranged(values, ndim)
    shape = (*values.shape[:-ndim], *boxes.sizes)
    out = torch.empty(shape, dtype=values.dtype, memory_format=layout_of(values))
    if out.numel():
        _box_means(
            *(math.prod(values.shape[:-ndim]) // channels, channels),
            *(boxes.shape.data_ptr(), boxes.edges.data_ptr(), boxes.divisors.data_ptr()),
            *(values.data_ptr(), out.data_ptr(), scratch(values.shape[-1])),
        )
    return out


def _gradients(grad: torch.Tensor, like: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    ndim = len(boxes.sizes)
    _check_shape(grad, (*like.shape[:-ndim], *boxes.sizes))
    grad, channels = arranged(grad, ndim)
    result = torch.empty(like.shape, dtype=grad.dtype, memory_format=layout_of(grad)).zero_()
    if grad.numel():
        _box_gradients(
            *(math.prod(like.shape[:-ndim]) // channels, channels),
            *(boxes.shape.data_ptr(), boxes.edges.data_ptr(), boxes.divisors.data_ptr()),
            *(grad.data_ptr(), result.data_ptr(), scratch(like.shape[-1] * channels)),
        )
    return result


def _check_shape(grad: torch.Tensor, expected: Sequence[int]) -> None:
    if grad.shape != torch.Size(expected):
        raise RuntimeError(f"got a gradient of shape {tuple(grad.shape)}, not {tuple(expected)}")


def _pooling(
    values: torch.Tensor,
    ndim: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | int,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Boxes:
    if divisor == 0:
        raise RuntimeError("divisor must be not zero")
    size = _each(kernel_size, ndim)
    return _windows(
        tuple(values.shape[-ndim:]),
        size,
        _each(stride, ndim) if stride else size,
        _each(padding, ndim),
        ceil_mode,
        count_include_pad,
        divisor,
    )


def _each(sizes: Sequence[int] | int, ndim: int) -> tuple[int, ...]:
    if isinstance(sizes, int):
        return (sizes,) * ndim
    return tuple(sizes) * ndim if len(sizes) == 1 else tuple(sizes)


@kernel("avg_pool2d", "avg_pool3d")
def avg_pool(
    values: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """Return the means of windows.

    Each column of a window is summed first (by depth, then height), then the columns from left to
    right; the sum is divided by the number of elements.
    """
    if not is_float32(values):
        return NotImplemented
    options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return means(values, _pooling(values, len(kernel_size), *options))


@kernel("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(
    grad: torch.Tensor,
    values: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Return, for each element, the sum of grad / divisor over the windows that hold it.

    Within a row of windows from left to right first; then over the rows, in order.
    """
    if not is_float32(grad, values):
        return NotImplemented
    options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _gradients(grad, values, _pooling(values, len(kernel_size), *options))


@kernel("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(values: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    """Return the means of parts, summed as windows are (`avg_pool`)."""
    if not is_float32(values):
        return NotImplemented
    ndim = len(output_size)
    return means(values, _parts(tuple(values.shape[-ndim:]), tuple(output_size)))


def _adaptive_avg_pool_backward(
    ndim: int, grad: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of adaptive average pooling, summed as for `avg_pool_backward`."""
    if not is_float32(grad, values):
        return NotImplemented
    return _gradients(grad, values, _parts(tuple(values.shape[-ndim:]), tuple(grad.shape[-ndim:])))


def _max_pool_backward(
    ndim: int,
    grad: torch.Tensor,
    values: torch.Tensor,
    *options: object,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return, for each element, the sum of grad where it is the maximum, in row-major order."""
    indices = cast(torch.Tensor, options[-1]) if indices is None else indices
    if not is_float32(grad, values):
        return NotImplemented
    _check_shape(grad, indices.shape)
    _check_shape(grad, (*values.shape[:-ndim], *grad.shape[-ndim:]))
    indices, channels = arranged(indices, ndim)
    layout = layout_of(indices)
    grad = grad.contiguous(memory_format=layout)
    result = torch.empty(values.shape, dtype=grad.dtype, memory_format=layout).zero_()
    if grad.numel():
        blocks = math.prod(values.shape[:-ndim]) // channels
        if channels == 1:
            add_rows(result.view(-1, 1), indices.view(-1), grad.view(-1, 1), blocks=blocks)
        else:
            add_elements(result, indices, grad, blocks=blocks, length=channels)
    return result


for _ndim in (2, 3):
    kernel(f"_adaptive_avg_pool{_ndim}d_backward")(
        functools.partial(_adaptive_avg_pool_backward, _ndim)
    )
    kernel(f"max_pool{_ndim}d_with_indices_backward", f"adaptive_max_pool{_ndim}d_backward")(
        functools.partial(_max_pool_backward, _ndim)
    )
