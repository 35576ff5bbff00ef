"""Gradients of moves that show an element in several places: windows, columns, padding."""

from __future__ import annotations

import math

import torch

from evenstep.arithmetic.arrays import is_float32
from evenstep.arithmetic.operations import kernel
from evenstep.arithmetic.scattered.indexing import add_rows

aten = torch.ops.aten


@kernel("unfold_backward")
def unfold_backward(
    grad: torch.Tensor, input_sizes: list[int], dim: int, size: int, step: int
) -> torch.Tensor:
    """Return sums of the windows that hold an element, in the order of its place in a window."""
    result = torch.zeros(input_sizes, dtype=grad.dtype)
    if grad.ndim == 1:
        return result.add_(grad.view(()) if result.ndim == 0 else grad)
    windows = grad.shape[dim]
    for place in range(size):
        part = result.narrow(dim, place, step * (windows - 1) + 1) if windows else result
        if windows:
            part[(slice(None),) * (dim % result.ndim) + (slice(None, None, step),)] += grad[
                ..., place
            ]
    return result


@kernel("col2im")
def col2im(
    columns: torch.Tensor,
    output_size: list[int],
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> torch.Tensor:
    """Return sums of the columns that hold a pixel, in row-major order of its place in a window."""
    kh, kw = kernel_size
    height, width = (n + 2 * p for n, p in zip(output_size, padding, strict=True))
    rows, across = (
        (n - d * (k - 1) - 1) // s + 1
        for n, d, k, s in zip((height, width), dilation, kernel_size, stride, strict=True)
    )
    lead = columns.shape[:-2]
    channels = columns.shape[-2] // (kh * kw)
    split = columns.reshape(*lead, channels, kh, kw, rows, across)
    image = torch.zeros(*split.shape[:-4], height, width, dtype=columns.dtype)
    for y in range(kh):
        for x in range(kw):
            top, left = y * dilation[0], x * dilation[1]
            image[
                ...,
                top : top + stride[0] * (rows - 1) + 1 : stride[0],
                left : left + stride[1] * (across - 1) + 1 : stride[1],
            ] += split[..., y, x, :, :]
    (down, aside) = padding
    return image[..., down : height - down, aside : width - aside].contiguous()


@kernel("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward")
def reflection_pad_backward(
    grad: torch.Tensor, like: torch.Tensor, padding: list[int]
) -> torch.Tensor:
    """Return sums of the numbers that show an element, in row-major order."""
    return _pad_backward("reflection_pad", grad, like, padding)


@kernel("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(
    grad: torch.Tensor, like: torch.Tensor, padding: list[int]
) -> torch.Tensor:
    """Return sums of the numbers that show an element, in row-major order."""
    return _pad_backward("replication_pad", grad, like, padding)


def _pad_backward(
    name: str, grad: torch.Tensor, like: torch.Tensor, padding: list[int]
) -> torch.Tensor:
    if not is_float32(grad, like):
        return NotImplemented
    ndim = len(padding) // 2
    space = like.shape[-ndim:]
    numbers = torch.arange(math.prod(space)).to(torch.float64).view(1, *space)
    at = getattr(aten, f"{name}{ndim}d").default(numbers, padding).reshape(-1)
    result = torch.zeros(like.shape, dtype=grad.dtype)
    blocks = result.numel() // numbers.numel()
    add_rows(result.view(-1, 1), at.to(torch.int64), grad.reshape(-1, 1), blocks=blocks)
    return result
