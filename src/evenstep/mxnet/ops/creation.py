"""Functions that make tensors of numbers on a device; without one, only the shape is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Shape = Sequence[int]


def _constant(value: float) -> Callable[..., Tensor]:
    def make(shape: Shape, dtype: torch.dtype, *, device: Any = "meta") -> Tensor:
        return torch.full(tuple(shape), value, dtype=dtype, device=device)

    return make


def full(shape: Shape, dtype: torch.dtype, value: float, *, device: Any = "meta") -> Tensor:
    """Return a tensor of one value."""
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def arange(
    start: float, stop: float, step: float, repeat: int, dtype: torch.dtype, *, device: Any = "meta"
) -> Tensor:
    """Return numbers from `start` to `stop`, each `repeat` times."""
    numbers = torch.arange(start, stop, step, dtype=dtype, device=device)
    return numbers if repeat == 1 else numbers.repeat_interleave(repeat)


def linspace(
    start: float, stop: float, num: int, endpoint: bool, dtype: torch.dtype, *, device: Any = "meta"
) -> Tensor:
    """Return `num` evenly spaced numbers."""
    last = stop if endpoint else stop - (stop - start) / num
    return torch.linspace(start, last, num, dtype=dtype, device=device)


def eye(rows: int, columns: int, shift: int, dtype: torch.dtype, *, device: Any = "meta") -> Tensor:
    """Return ones on a diagonal, and zeros elsewhere."""
    ones = torch.ones(rows, columns, dtype=dtype, device=device)
    return ones.triu(shift).tril(shift)


ones = _constant(1)
zeros = _constant(0)
