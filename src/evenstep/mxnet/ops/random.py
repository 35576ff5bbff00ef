"""Random numbers, drawn from the generator of a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

Shape = Sequence[int]
Fill = Callable[[Tensor, Generator], Tensor]


def _drawn(shape: Shape, dtype: torch.dtype, generator: Generator, fill: Fill) -> Tensor:
    device = "meta" if generator is None else generator.device
    return fill(torch.empty(tuple(shape), dtype=dtype, device=device), generator)


def normal(
    shape: Shape, dtype: torch.dtype, loc: float = 0.0, scale: float = 1.0, *, generator: Any = None
) -> Tensor:
    """Draw from the normal distribution with mean `loc` and standard deviation `scale`."""
    return _drawn(shape, dtype, generator, lambda t, g: t.normal_(loc, scale, generator=g))


def uniform(
    shape: Shape, dtype: torch.dtype, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    """Draw from the uniform distribution on [low, high)."""
    return _drawn(shape, dtype, generator, lambda t, g: t.uniform_(low, high, generator=g))


def randint(
    shape: Shape, dtype: torch.dtype, low: int, high: int, *, generator: Any = None
) -> Tensor:
    """Draw integers from low to high - 1."""
    return _drawn(shape, dtype, generator, lambda t, g: t.random_(low, high, generator=g))


def exponential(
    shape: Shape, dtype: torch.dtype, scale: float = 1.0, *, generator: Any = None
) -> Tensor:
    """Draw from the exponential distribution with mean `scale`."""
    return _drawn(shape, dtype, generator, lambda t, g: t.exponential_(1 / scale, generator=g))


def shuffle(data: Tensor, *, generator: Any = None) -> Tensor:
    """Return the rows in a random order."""
    if data.is_meta:
        return torch.empty_like(data)
    order = torch.randperm(len(data), generator=generator, device=data.device)
    return data.index_select(0, order)


def multinomial(data: Tensor, shape: int = 1, *, generator: Any = None) -> Tensor:
    """Draw indices with the probabilities in the rows of `data`."""
    if data.is_meta:
        return data.new_empty((*data.shape[:-1], shape), dtype=torch.int32)
    return torch.multinomial(data, shape, replacement=True, generator=generator).to(torch.int32)


def draw_signs(data: Tensor, *, generator: Any = None) -> Tensor:
    """Draw from the Bernoulli distribution with the probabilities in `data`."""
    return torch.empty_like(data).bernoulli_(data, generator=generator)
