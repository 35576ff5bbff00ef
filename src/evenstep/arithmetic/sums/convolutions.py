"""Convolutions, transposed ones, and their gradients.

* An element of a convolution is one chain of fused multiply-adds over (input channel of its group,
  kernel position), ascending, that begins with +0; the bias is added last. Zeros of the padding are
  multiplied like any other input: 0 · inf is NaN.
* An element of the input's gradient, which is what a transposed convolution computes, is one chain
  over (output channel of its group, kernel position), ascending. A kernel position that meets no
  output because of the stride is left out; outputs beyond the edges count as zeros.
* An element of the weights' gradient is one chain over (example, output position), ascending.
* An element of the bias's gradient is a sum over (example, output position), as any other sum
  (`c/sums.h`).
"""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from evenstep.arithmetic.arrays import is_float32, layout_of
from evenstep.arithmetic.native import Function, scratch
from evenstep.arithmetic.operations import kernel
from evenstep.arithmetic.sums.products import SCRATCH
from evenstep.arithmetic.sums.reductions import VALUES, reduced_to

aten = torch.ops.aten

_convolve = Function("convolve", "pppppp")
_convolve_for_weights = Function("convolve_for_weights", "ppppp")

_BLOCK = 1024  # output positions, of one example or several, to compute at a time
_CHUNK = 64  # CHUNK in C

Shape = tuple[int, ...]


class Window(NamedTuple):
    """How a kernel moves over its source: arguments of a convolution, a number for each axis."""

    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int


class Array(NamedTuple):
    """A tensor's shape and strides."""

    shape: Shape
    strides: Shape

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Array:
        """Return those of `tensor`."""
        return cls(tensor.shape, tensor.stride())


@kernel("convolution", "_convolution")
def convolution(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *flags: bool,
) -> torch.Tensor:
    """Return a convolution with 1 to 3 axes of a batch, in the layout that torch gives it.

    Flags choose between torch's own implementations.
    """
    if not is_float32(source, weight, bias):
        return NotImplemented
    window = Window(tuple(stride), tuple(padding), tuple(dilation), groups)
    shape = _out_shape(source.shape, weight.shape, window, transposed, tuple(output_padding))
    if shape is None or (bias is not None and bias.shape != shape[1:2]):
        args = (stride, padding, dilation, transposed, output_padding, groups)
        torch.convolution(source, weight, bias, *args)  # raises torch's error
        return NotImplemented
    out = torch.empty(shape, dtype=torch.float32, memory_format=_common_layout(source, weight))
    _run(source, weight, bias, out, window, transposed)
    return out


@kernel("convolution_backward")
def convolution_backward(
    of_out: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the input, the weights and the bias; None where the mask is false."""
    if not is_float32(of_out, source, weight):
        return NotImplemented
    window = Window(tuple(stride), tuple(padding), tuple(dilation), groups)
    shape = _out_shape(source.shape, weight.shape, window, transposed, tuple(output_padding))
    if shape != of_out.shape:
        args = (stride, padding, dilation, transposed, output_padding, groups, output_mask)
        aten.convolution_backward.default(of_out, source, weight, bias_sizes, *args)  # raises
        return NotImplemented
    layout = _common_layout(source, weight)
    of_source = of_weight = None
    if output_mask[0]:
        of_source = torch.empty(source.shape, dtype=torch.float32, memory_format=layout)
        _run(of_out, weight, None, of_source, window, not transposed)
    if output_mask[1]:
        of_weight = torch.empty(weight.shape, dtype=torch.float32)
        wide, narrow = (of_out, source) if transposed else (source, of_out)
        _run_for_weights(wide, narrow, of_weight, window)
        of_weight = of_weight.contiguous(memory_format=layout)  # faster than to compute it so
    if not output_mask[2]:
        return of_source, of_weight, None
    return of_source, of_weight, reduced_to(VALUES, of_out, [0, *range(2, of_out.ndim)], False)


def gradients_by_shard(
    of_out: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor,
    window: Window,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weights and bias of several batches, along the first dimension.

    Args:
        of_out: the output's gradients, contiguous; the second dimension counts examples.
        source: the inputs, as well.
        weight: contiguous, and the same for all batches.
        window: of a convolution that is not transposed.
        mask: whether the gradients of weights and bias are wanted.
    """
    of_weight = of_bias = None
    if mask[0]:
        of_weight = weight.new_empty((len(of_out), *weight.shape))
        parts = (source[0], weight, of_out[0])
        geometry = _geometry(*map(Array.of, parts), window, False)
        memory = scratch(geometry.floats)
        for at in zip(*map(_addresses, (source, of_out, of_weight)), strict=True):
            _convolve_for_weights(geometry.address, *at, memory)
    if mask[1]:
        of_bias = reduced_to(VALUES, of_out, [1, *range(3, of_out.ndim)], False)
    return of_weight, of_bias


def _addresses(tensor: torch.Tensor) -> Sequence[int]:
    """Return the addresses of the parts along the first dimension."""
    begin, step = tensor.data_ptr(), tensor.stride(0) * tensor.itemsize
    return range(begin, begin + step * len(tensor), step)


def _run(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    window: Window,
    transposed: bool,
) -> None:
    """Write a convolution to `out`."""
    if out.numel() == 0:
        return
    geometry = _geometry(Array.of(source), Array.of(weight), Array.of(out), window, transposed)
    if bias is not None:
        bias = bias.contiguous()
    _convolve(
        geometry.address,
        *(source.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(out.data_ptr(), scratch(geometry.floats)),
    )


def _run_for_weights(
    source: torch.Tensor, of_out: torch.Tensor, weight: torch.Tensor, window: Window
) -> None:
    """Write the weights' gradient to `weight`."""
    if of_out.numel() == 0:
        weight.zero_()
        return
    geometry = _geometry(Array.of(source), Array.of(weight), Array.of(of_out), window, False)
    _convolve_for_weights(
        geometry.address,
        *(source.data_ptr(), of_out.data_ptr(), weight.data_ptr(), scratch(geometry.floats)),
    )


def _common_layout(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return the memory layout of a convolution's result: channels-last if one operand has it."""
    layout = layout_of(source)
    return layout_of(weight) if layout is torch.contiguous_format else layout


@functools.lru_cache(maxsize=4096)
def _out_shape(
    source: Shape, weight: Shape, window: Window, transposed: bool, output_padding: Shape
) -> Shape | None:
    """Return a convolution's shape; None if there is none."""
    axes = len(source) - 2
    if not 1 <= axes <= 3 or len(weight) != axes + 2 or window.groups < 1:
        return None
    stride, padding, dilation = (part * axes if len(part) == 1 else part for part in window[:3])
    if (*stride, *padding, *dilation) != (*window.stride, *window.padding, *window.dilation):
        return None
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0 or len(padding) != axes:
        return None
    taken, made = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    taken, made = (taken, made * window.groups) if transposed else (taken * window.groups, made)
    if source[1] != taken or taken % window.groups or made % window.groups or 0 in weight:
        return None
    reach = [d * (k - 1) for d, k in zip(dilation, weight[2:], strict=True)]
    if transposed:
        most = map(max, stride, dilation)
        if not all(0 <= more < limit for more, limit in zip(output_padding, most, strict=True)):
            return None
        space = [
            (n - 1) * s - 2 * p + r + o + 1
            for n, s, p, r, o in zip(
                source[2:], stride, padding, reach, output_padding, strict=True
            )
        ]
    else:
        space = [
            (n + 2 * p - r - 1) // s + 1
            for n, s, p, r in zip(source[2:], stride, padding, reach, strict=True)
        ]
    return None if min(space) < 1 or 0 in source[1:] else (source[0], made, *space)


class Geometry:
    """What C needs to know about a convolution: `struct convolution` of `c/convolutions.h`."""

    def __init__(self, values: Sequence[int], floats: int) -> None:
        self._values = array.array("l", values)
        self.address = self._values.buffer_info()[0]
        self.floats = floats
        """How much working memory it needs."""


@functools.lru_cache(maxsize=4096)
def _geometry(
    source: Array, weight: Array, out: Array, window: Window, transposed: bool
) -> Geometry:
    """Return a convolution's geometry, from the arrays that C reads and writes."""
    first, second = weight.shape[0] // window.groups, weight.shape[1]
    step, inner = weight.strides[:2]
    inputs, outputs = (first, second) if transposed else (second, first)
    by_output, by_input = (inner, step) if transposed else (step, inner)
    axes = _axes(source, weight, out, window, transposed)
    positions = math.prod(axis.out for axis in axes)
    block = min(out.shape[0], -(-_BLOCK // positions))
    depthwise = inputs == outputs == 1
    in_place = not depthwise and _can_be_in_place(axes)
    taps = math.prod(axis.taps for axis in axes)
    columns = block * axes[0].out * axes[1].out * max(axes[2].out, axes[2].pitch)
    floats = SCRATCH + 2 * (2 * outputs + 2 * inputs * taps + 2 * columns)
    size = math.prod(axis.planes * axis.pitch for axis in axes)
    if depthwise:
        floats += 2 * (size + _CHUNK) + 16 * taps
    elif not in_place:
        floats += block * window.groups * inputs * size
    kind = (transposed, in_place, depthwise)
    numbers = (
        *(out.shape[0], window.groups, inputs, outputs, *kind, block),
        *(*source.strides[:2], *out.strides[:2], first * step, by_output, by_input),
    )
    return Geometry([*numbers, *(value for axis in axes for value in axis)], floats)


class _Axis(NamedTuple):
    """An axis, as `struct axis` in C."""

    taps: int
    dilation: int
    stride: int
    padding: int
    source: int
    out: int
    source_stride: int
    out_stride: int
    weight_stride: int
    phases: int = 1
    planes: int = 1
    pitch: int = 1
    step: int = 1
    low: int = 0


def _axes(
    source: Array, weight: Array, out: Array, window: Window, transposed: bool
) -> list[_Axis]:
    """Return three axes: missing ones, of size 1, come first."""
    given = zip(
        *(weight.shape[2:], window.dilation, window.stride, window.padding),
        *(source.shape[2:], out.shape[2:]),
        *(source.strides[2:], out.strides[2:], weight.strides[2:]),
        strict=True,
    )
    axes = [(_transposed_axis if transposed else _axis)(_Axis(*values)) for values in given]
    missing = _Axis(1, 1, 1, 0, 1, 1, 0, 0, 0)
    return [missing] * (3 - len(axes)) + axes


def _axis(axis: _Axis) -> _Axis:
    """Place kernel position t at source element out · stride + t · dilation − padding."""
    at = [tap * axis.dilation for tap in range(axis.taps)]
    return axis._replace(
        planes=max(place % axis.stride for place in at) + 1,
        pitch=axis.out + at[-1] // axis.stride,
        step=axis.stride,
        low=axis.padding,
    )


def _transposed_axis(axis: _Axis) -> _Axis:
    """Place kernel position t at source element (out + padding − t · dilation) / stride."""
    lowest = (axis.padding - (axis.taps - 1) * axis.dilation) // axis.stride
    highest = (axis.stride - 1 + axis.padding) // axis.stride
    pitch = -(-axis.out // axis.stride) + highest - lowest
    return axis._replace(phases=axis.stride, pitch=pitch, low=-lowest)


def _can_be_in_place(axes: Sequence[_Axis]) -> bool:
    """Whether the source can be read without a copy, and as fast."""
    if any(a.low or (a.pitch - 1) * a.step + a.planes > a.source for a in axes):
        return False
    is_contiguous = axes[-1].source_stride == 1 and all(a.step == 1 for a in axes)
    return is_contiguous or all(a.taps == 1 for a in axes)
