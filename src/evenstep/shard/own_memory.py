"""Gradients in memory of their own, which can be added to and divided in place.

Autograd gives a parameter whatever tensor the last function of its backward pass has returned.
That tensor can be a view of the memory of another parameter's gradient (in
`x + (p.flatten() + q.flatten())`), of a tensor that the same backward pass has yet to read, or of a
buffer that a hook or a custom function keeps. Each storage counts its users, which shows it.
"""

from __future__ import annotations

from typing import Any

import torch

_users: Any = torch._C._storage_Use_Count
_ONE_TENSOR = torch.empty(1)
_USERS_OF_ONE = _users(_ONE_TENSOR.untyped_storage()._cdata)  # the tensor, and what counts them


def with_own_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient that shares its memory with nothing: itself, or a copy.

    A copy has the values and, where they leave no gaps, the strides of `gradient`. Memory that
    torch has not allocated (`torch.from_numpy`) counts as shared, and so does a part of a larger
    storage, or one that an expanded gradient has fewer elements in than it shows.
    """
    storage = gradient.untyped_storage()
    is_alone = (
        _users(storage._cdata) == _USERS_OF_ONE
        and storage.nbytes() == gradient.nbytes
        and storage.resizable()
    )
    return gradient if is_alone and not gradient.is_conj() else gradient.clone()


def sparse_with_own_memory(gradient: torch.Tensor, *, coalesce: bool) -> torch.Tensor:
    """Return a sparse gradient that shares its memory with nothing.

    Its values are usually a view of the gradient of what the layer has returned.

    Args:
        gradient: the gradient.
        coalesce: whether to add up the values of rows that occur several times.
    """
    if coalesce and not gradient.is_coalesced():
        return gradient.coalesce()
    return gradient.clone()
