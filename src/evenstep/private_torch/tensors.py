"""Tensors and their memory: how often one was written to, and who else holds its storage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenstep.private_torch.names import attribute, private

with torch.inference_mode(False):
    _ONE = torch.empty(1, device="cpu")

version_of: Callable[[torch.Tensor], int] = attribute(
    _ONE, "_version", "see which tensors were written to"
)
"""How often a tensor was written to in place; it must not be an inference tensor."""

_indices_of = attribute(_ONE, "_indices", "read the rows of a sparse tensor as they are")
_values_of = attribute(_ONE, "_values", "read the rows of a sparse tensor as they are")


def rows_of(sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of a COO tensor's rows and their values, as they are: a row may repeat."""
    return _indices_of(sparse)(), _values_of(sparse)()


# ---- memory

handle_of: Callable[[torch.UntypedStorage], int] = attribute(
    _ONE.untyped_storage(),
    "_cdata",
    "tell storages apart",
    public_way=torch.UntypedStorage.data_ptr,
)
"""Return a number for a storage; storages that are not empty have different ones."""


def _unknown(_handle: int) -> float:
    """Stand for a count that equals no number: memory then counts as shared, and is copied."""
    return math.nan


users_of: Callable[[int], float] = private(
    "torch._C",
    "_storage_Use_Count",
    "see whether something else holds a tensor's memory",
    public_way=_unknown,
)
"""Return how many hold a storage, given its handle; a number that equals nothing if unknown."""

if handle_of is torch.UntypedStorage.data_ptr:  # which is no handle
    users_of = _unknown
_STORAGE_OF_ONE = _ONE.untyped_storage()
USERS_OF_ONE = users_of(handle_of(_STORAGE_OF_ONE))
"""The users of a storage that has one tensor: the tensor, and the variable of who counts them.

Torch 2.9 and older no longer count such an object of Python's once it is gone.
"""

_is_view = attribute(
    _ONE, "_is_view", "see whether a tensor is a view", public_way=lambda _: lambda: True
)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd knows a tensor as a view; True if unknown."""
    return bool(_is_view(tensor)())


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common if, and only if, they share a storage.

    The storage must not be empty.
    """
    return handle_of(tensor.untyped_storage())


# ---- many tensors in one call


def _copy_each(
    tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source, non_blocking)


def _add_each(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other)


def _divide_each(tensors: Sequence[torch.Tensor], number: float) -> None:
    for tensor in tensors:
        tensor.div_(number)


copy_all: Callable[..., Any] = private(
    "torch", "_foreach_copy_", "copy many tensors in one call", public_way=_copy_each
)
"""Copy the second tensors into the first ones, in place; `non_blocking` as in `Tensor.copy_`."""

add_all: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any] = private(
    "torch", "_foreach_add_", "add many tensors in one call", public_way=_add_each
)
"""Add the second tensors to the first ones, in place."""

divide_all: Callable[[Sequence[torch.Tensor], float], Any] = private(
    "torch", "_foreach_div_", "divide many tensors in one call", public_way=_divide_each
)
"""Divide tensors by a number, in place."""
