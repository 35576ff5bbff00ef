"""Tensors as the arrays that C functions take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

Scalar: TypeAlias = "int | float | bool"

_FLOAT32, _STRIDED = torch.float32, torch.strided
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_float32(*values: object) -> bool:
    """Whether all tensors among `values` are dense float32 tensors on a CPU, and there is one."""
    found = False
    for one in values:
        if isinstance(one, torch.Tensor):
            if one.dtype is not _FLOAT32 or not one.is_cpu or one.layout is not _STRIDED:
                return False
            found = True
    return found


def aligned(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Broadcast tensors to one shape, in one dense memory layout.

    Returns:
        Tensors whose elements at the same place in memory, counted from the first, belong together.
        The layout is channels-last if that of the first with the full shape is; else contiguous.
        Tensors that have it already are not copied.
    """
    if len(tensors) > 1:
        shape = tensors[0].shape
        if any(one.shape != shape for one in tensors):
            tensors = tuple(torch.broadcast_tensors(*tensors))
    layout = layout_of(tensors[0])
    return [one.contiguous(memory_format=layout) for one in tensors]


def layout_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format of a dense tensor; contiguous for any other tensor."""
    if tensor.ndim in _CHANNELS_LAST and not tensor.is_contiguous():
        layout = _CHANNELS_LAST[tensor.ndim]
        if tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format


def written(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write a result to the tensor that an in-place operation was called for, and return that.

    Raises:
        RuntimeError: the tensor can't hold numbers of that kind, as in torch.
    """
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to {target.dtype}")
    return target.copy_(value)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the addresses of tensors' first elements."""
    return [one.data_ptr() for one in tensors]
