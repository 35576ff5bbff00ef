"""Resizing of signals, images and volumes, and its gradients: one axis after the other."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch

from evenstep.arithmetic.arrays import addresses, is_float32, layout_of
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import composed, kernel, operation
from evenstep.arithmetic.scattered.pooling import Boxes, arranged, boxes_of, means

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


def _resized(
    values: torch.Tensor, sizes: Sequence[int], axes: Sequence[Taps], *, back: bool = False
) -> torch.Tensor:
    """Resize each axis, the last first; or, if `back`, return gradients, the first axis first."""
    space = list(values.shape[2:])
    values, channels = arranged(values, len(space))
    planes = math.prod(values.shape[:2]) // channels if channels else 0
    run = _interpolated_gradients if back else _interpolated
    for axis in range(len(space)) if back else reversed(range(len(space))):
        given, space[axis] = space[axis], sizes[axis]
        shape = (*values.shape[:2], *space)
        result = torch.empty(shape, dtype=values.dtype, memory_format=layout_of(values))
        if back:
            result.zero_()
        if values.numel():
            at, weight = axes[axis]
            run(
                planes * math.prod(space[:axis]),
                *((sizes[axis], given) if back else (given, sizes[axis])),
                *(math.prod(space[axis + 1 :]) * channels, at.shape[1]),
                *addresses([at, weight, values, result]),
            )
        values = result
    return values


def _interpolate(
    of: Callable[..., Taps],
    values: torch.Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Interpolate along each axis, the last first: x₀ w₀ + x₁ w₁ + …, all but the first fused."""
    if not is_float32(values):
        return NotImplemented
    axes = _axes(of, values.shape[2:], output_size, align_corners, scales, named)
    return _resized(values, output_size, axes)


def _axes(
    of: Callable[..., Taps],
    before: Sequence[int],
    after: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
    named: dict[str, float | None],
) -> list[Taps]:
    given = _given(len(before), scales, named)
    if not all(size > 0 for size in (*before, *after)):
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, but got {list(before)} and "
            f"{list(after)}"
        )
    return [
        of(*sizes, align_corners, scale) for *sizes, scale in zip(before, after, given, strict=True)
    ]


def _given(
    ndim: int, scales: Sequence[float | None], named: dict[str, float | None]
) -> list[float | None]:
    """Return the factor of each axis, which come by position or by name."""
    names = ["scales"] if ndim == 1 else ["scales_d", "scales_h", "scales_w"][-ndim:]
    return [*scales, *(named.get(name) for name in names[len(scales) :])]


def _interpolate_backward(
    of: Callable[..., Taps],
    grad: torch.Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Return sums of weight · grad, fused, along each axis, the first axis first, in order."""
    if not is_float32(grad):
        return NotImplemented
    space = input_size[2:]
    axes = _axes(of, space, grad.shape[2:], align_corners, scales, named)
    return _resized(grad, space, axes, back=True)


def _nearest_backward(
    exact: bool,
    grad: torch.Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *scales: float | None,
    **named: float | None,
) -> torch.Tensor:
    """Return sums of grad where a number is shown: columns first, then from left to right."""
    if not is_float32(grad):
        return NotImplemented
    before, after = tuple(input_size[2:]), tuple(grad.shape[2:])
    return means(grad, _shown(before, after, exact, tuple(_given(len(before), scales, named))))


def _by(
    resize: Callable[..., torch.Tensor],
    values: torch.Tensor,
    sizes: list[int] | None,
    align_corners: bool,
    factors: list[float] | None,
) -> torch.Tensor:
    """Interpolate to a size, or by factors, as in inference mode."""
    if sizes is None:
        assert factors is not None
        sizes = [int(size * by) for size, by in zip(values.shape[2:], factors, strict=True)]
    scales = factors or itertools.repeat(None, len(sizes))
    return resize(values, sizes, align_corners, *scales)


for _name in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d"):
    _taps_of = _cubic if _name == "bicubic2d" else _linear
    kernel(f"upsample_{_name}")(functools.partial(_interpolate, _taps_of))
    kernel(f"upsample_{_name}_backward")(functools.partial(_interpolate_backward, _taps_of))
    composed(f"upsample_{_name}.vec")(functools.partial(_by, operation(f"upsample_{_name}")))
for _ndim in ("1d", "2d", "3d"):
    kernel(f"upsample_nearest{_ndim}_backward")(functools.partial(_nearest_backward, False))
    kernel(f"_upsample_nearest_exact{_ndim}_backward")(functools.partial(_nearest_backward, True))
