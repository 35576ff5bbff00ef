"""Helpers of Gluon: batches split over contexts, and gradients clipped by their norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evenstep.errors import MXNetError
from evenstep.mxnet.core.array import NDArray, array_class, from_values
from evenstep.mxnet.core.context import Context, cpu

__all__ = ["clip_global_norm", "split_and_load", "split_data"]


def split_data(
    data: NDArray, num_slice: int, batch_axis: int = 0, even_split: bool = True
) -> list[Any]:
    """Return the parts of an array along the batch axis; without `even_split`, the last is longer.

    Raises:
        MXNetError: the parts would differ in size, with `even_split`.
    """
    size = data.shape[batch_axis]
    if size < num_slice or (even_split and size % num_slice):
        raise MXNetError(
            f"got {size} examples for {num_slice} contexts: use a batch size that is divisible by "
            f"{num_slice}, or give even_split=False"
        )
    step, before = size // num_slice, (slice(None),) * batch_axis
    ends = [step * (i + 1) for i in range(num_slice - 1)] + [size]
    keys: list[Any] = [(*before, slice(i * step, end)) for i, end in enumerate(ends)]
    return [data[key] for key in keys]


def split_and_load(
    data: Any, ctx_list: Sequence[Context], batch_axis: int = 0, even_split: bool = True
) -> list[Any]:
    """Return a part of an array on each context."""
    if not isinstance(data, NDArray):
        data = from_values(data, cpu(), None, array_class())
    parts = split_data(data, len(ctx_list), batch_axis, even_split)
    return [part.as_in_context(ctx) for part, ctx in zip(parts, ctx_list, strict=True)]


def clip_global_norm(
    arrays: Sequence[NDArray], max_norm: float, check_isfinite: bool = True
) -> float:
    """Scale arrays in place so that their common norm is at most `max_norm`. Waits for them.

    Returns:
        The norm before.
    """
    squares = [float((one.detach() * one.detach()).sum()) for one in arrays]
    total = math.sqrt(sum(squares))
    if check_isfinite and not math.isfinite(total):
        raise MXNetError(f"the gradients have the norm {total}: they are not finite")
    if total > max_norm:
        for one in arrays:
            one *= max_norm / (total + 1e-8)
    return total
