"""Resizing of signals, images and volumes, and its gradients: one axis after the other."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from evenstep.arithmetic.arrays import is_float32, layout_of
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import composed, kernel, operation
from evenstep.arithmetic.scattered.pooling import Boxes, boxes_of, means

aten = torch.ops.aten

_interpolated = Function("interpolated", "lllllpppp")
_interpolated_gradients = Function("interpolated_gradients", "lllllpppp")

Taps = tuple[torch.Tensor, torch.Tensor]
"""For each number of a resized axis: the places of some numbers before, and their weights."""


def _source(place: int, before: int, after: int, align_corners: bool, scale: float | None) -> float:
    """Return where a number of the resized axis lies on the axis before, computed in float64."""
    if align_corners:
        return place * (before - 1) / (after - 1) if after > 1 else 0.0
    step = 1 / scale if scale else before / after
    return step * (place + 0.5) - 0.5


def _taps(places: list[list[int]], weights: list[list[float]]) -> Taps:
    return torch.tensor(places), torch.tensor(weights, dtype=torch.float32)


@functools.lru_cache(maxsize=256)
def _linear(before: int, after: int, align_corners: bool, scale: float | None) -> Taps:
    """Return the two neighbours, weighted by nearness."""
    places, weights = [], []
    for place in range(after):
        at = max(_source(place, before, after, align_corners, scale), 0.0)
        left = min(int(at), before - 1)
        places.append([left, min(left + 1, before - 1)])
        weights.append([1 - (at - left), at - left])
    return _taps(places, weights)


@functools.lru_cache(maxsize=256)
def _cubic(before: int, after: int, align_corners: bool, scale: float | None) -> Taps:
    """Return the four neighbours with the weights of cubic convolution (Keys, 1981), a = −0.75."""
    places, weights = [], []
    for place in range(after):
        at = _source(place, before, after, align_corners, scale)
        left = math.floor(at)
        places.append([min(max(left + shift, 0), before - 1) for shift in (-1, 0, 1, 2)])
        weights.append([_keys(abs(at - left - shift)) for shift in (-1, 0, 1, 2)])
    return _taps(places, weights)


def _keys(distance: float, a: float = -0.75) -> float:
    if distance <= 1:
        return ((a + 2) * distance - (a + 3)) * distance * distance + 1
    return ((distance - 5) * distance + 8) * distance * a - 4 * a


@functools.lru_cache(maxsize=256)
def _shown(
    before: tuple[int, ...], after: tuple[int, ...], exact: bool, scales: tuple[float | None, ...]
) -> Boxes:
    """Return, for each number, the box of those that torch's own forward pass takes from it."""
    name = "_upsample_nearest_exact1d" if exact else "upsample_nearest1d"
    resize = operation(name).overloadpacket
    axes = []
    for size, count, scale in zip(before, after, scales, strict=True):
        numbers = torch.arange(size).to(torch.float64).view(1, 1, -1)
        taken = resize.default(numbers, [count], scale).flatten()
        edges = torch.searchsorted(taken, torch.arange(size + 1).to(torch.float64)).tolist()
        axes.append([(edges[at], edges[at + 1]) for at in range(size)])
    return boxes_of(after, axes, [1.0] * math.prod(before))


def _along(sizes: Sequence[int], axis: int, together: int) -> tuple[int, int]:
    """Return how many numbers lie before and behind an axis in memory (`together`: of channels)."""
    return math.prod(sizes[:axis]), math.prod(sizes[axis + 1 :]) * together


def _resized(values: torch.Tensor, sizes: Sequence[int], axes: Sequence[Taps]) -> torch.Tensor:
    layout = layout_of(values)
    values = values.contiguous(memory_format=layout)
    channels = 1 if layout is torch.contiguous_format else values.shape[1]
    planes = math.prod(values.shape[:2]) // channels if channels else 0
    space = list(values.shape[2:])
    for axis in reversed(range(len(space))):
        outer, inner = _along([planes, *space], axis + 1, channels)
        at, weight = axes[axis]
        before, space[axis] = space[axis], sizes[axis]
        result = torch.empty((*values.shape[:2], *space), dtype=values.dtype, memory_format=layout)
        if result.numel():
            shape = (outer, before, sizes[axis], inner, at.shape[1])
            tables = (at.data_ptr(), weight.data_ptr())
            _interpolated(*shape, *tables, values.data_ptr(), result.data_ptr())
        values = result
    return values


def _gradients(grad: torch.Tensor, sizes: Sequence[int], axes: Sequence[Taps]) -> torch.Tensor:
    layout = layout_of(grad)
    grad = grad.contiguous(memory_format=layout)
    channels = 1 if layout is torch.contiguous_format else grad.shape[1]
    planes = math.prod(grad.shape[:2]) // channels if channels else 0
    space = list(grad.shape[2:])
    for axis, (at, weight) in enumerate(axes):
        outer, inner = _along([planes, *space], axis + 1, channels)
        after, space[axis] = space[axis], sizes[axis]
        result = torch.empty((*grad.shape[:2], *space), dtype=grad.dtype, memory_format=layout)
        result.zero_()
        if grad.numel():
            shape = (outer, sizes[axis], after, inner, at.shape[1])
            tables = (at.data_ptr(), weight.data_ptr())
            _interpolated_gradients(*shape, *tables, grad.data_ptr(), result.data_ptr())
        grad = result
    return grad


@kernel("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def upsample_linear(
    values: torch.Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Interpolate linearly along each axis, the last first: x₀ (1 − w) + x₁ w, the second fused."""
    return _forward(_linear, values, output_size, align_corners, scales, named)


@kernel("upsample_bicubic2d")
def upsample_cubic(
    values: torch.Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Interpolate by cubic convolution along each axis, the last first, from left to right."""
    return _forward(_cubic, values, output_size, align_corners, scales, named)


def _forward(
    of: Callable[..., Taps],
    values: torch.Tensor,
    output_size: Sequence[int],
    flag: bool,
    scales: Sequence[float | None],
    named: dict[str, float | None],
) -> torch.Tensor:
    if not is_float32(values):
        return NotImplemented
    return _resized(
        values, output_size, _axes(of, values.shape[2:], output_size, flag, scales, named)
    )


def _axes(
    of: Callable[..., Taps],
    before: Sequence[int],
    after: Sequence[int],
    flag: bool,
    scales: Sequence[float | None],
    named: dict[str, float | None],
) -> list[Taps]:
    given = _given(len(before), scales, named)
    if not all(size > 0 for size in (*before, *after)):
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, but got {list(before)} and "
            f"{list(after)}"
        )
    return [of(*one, flag, scale) for *one, scale in zip(before, after, given, strict=True)]


def _given(
    ndim: int, scales: Sequence[float | None], named: dict[str, float | None]
) -> list[float | None]:
    """Return the factor of each axis, which come by position or by name."""
    names = ["scales"] if ndim == 1 else ["scales_d", "scales_h", "scales_w"][-ndim:]
    return [*scales, *(named.get(name) for name in names[len(scales) :])]


@kernel(
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward"
)
def upsample_linear_backward(
    grad: torch.Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Return sums of weight · grad, fused, along each axis, the first axis first, in order."""
    return _backward(_linear, grad, input_size, align_corners, scales, named)


@kernel("upsample_bicubic2d_backward")
def upsample_cubic_backward(
    grad: torch.Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Return sums of weight · grad, fused, along each axis, the first axis first, in order."""
    return _backward(_cubic, grad, input_size, align_corners, scales, named)


@kernel("upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward")
def upsample_nearest_backward(
    grad: torch.Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Return sums of grad where a number is shown: columns first, then from left to right."""
    return _sums(grad, input_size, False, scales, named)


@kernel(
    "_upsample_nearest_exact1d_backward",
    "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d_backward",
)
def upsample_nearest_exact_backward(
    grad: torch.Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Return sums of grad where a number is shown: columns first, then from left to right."""
    return _sums(grad, input_size, True, scales, named)


def _sums(
    grad: torch.Tensor,
    input_size: Sequence[int],
    exact: bool,
    scales: Sequence[float | None],
    named: dict[str, float | None],
) -> torch.Tensor:
    if not is_float32(grad):
        return NotImplemented
    before, after = tuple(input_size[2:]), tuple(grad.shape[2:])
    return means(grad, _shown(before, after, exact, tuple(_given(len(before), scales, named))))


def _backward(
    of: Callable[..., Taps],
    grad: torch.Tensor,
    input_size: Sequence[int],
    flag: bool,
    scales: Sequence[float | None],
    named: dict[str, float | None],
) -> torch.Tensor:
    if not is_float32(grad):
        return NotImplemented
    space = input_size[2:]
    return _gradients(grad, space, _axes(of, space, grad.shape[2:], flag, scales, named))


# ---- sizes by factors, as in inference mode


@composed("upsample_linear1d.vec")
def upsample_linear1d(
    values: torch.Tensor, sizes: list[int] | None, align_corners: bool, factors: list[float] | None
) -> torch.Tensor:
    """Interpolate to a size, or by a factor."""
    return _by(aten.upsample_linear1d, values, sizes, align_corners, factors)


@composed("upsample_bilinear2d.vec")
def upsample_bilinear2d(
    values: torch.Tensor, sizes: list[int] | None, align_corners: bool, factors: list[float] | None
) -> torch.Tensor:
    """Interpolate to a size, or by factors."""
    return _by(aten.upsample_bilinear2d, values, sizes, align_corners, factors)


@composed("upsample_trilinear3d.vec")
def upsample_trilinear3d(
    values: torch.Tensor, sizes: list[int] | None, align_corners: bool, factors: list[float] | None
) -> torch.Tensor:
    """Interpolate to a size, or by factors."""
    return _by(aten.upsample_trilinear3d, values, sizes, align_corners, factors)


@composed("upsample_bicubic2d.vec")
def upsample_bicubic2d(
    values: torch.Tensor, sizes: list[int] | None, align_corners: bool, factors: list[float] | None
) -> torch.Tensor:
    """Interpolate to a size, or by factors."""
    return _by(aten.upsample_bicubic2d, values, sizes, align_corners, factors)


def _by(
    resize: Callable[..., torch.Tensor],
    values: torch.Tensor,
    sizes: list[int] | None,
    align_corners: bool,
    factors: list[float] | None,
) -> torch.Tensor:
    if sizes is None:
        assert factors is not None
        sizes = [int(size * by) for size, by in zip(values.shape[2:], factors, strict=True)]
    scales = factors or itertools.repeat(None, len(sizes))
    return resize(values, sizes, align_corners, *scales)
