"""Gradients of several shards, added up."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import torch

from evenstep.arithmetic.native import Function
from evenstep.arithmetic.together.blocks import NotTogetherError, blocks_of, of_shards, shards_of
from evenstep.private_torch.tensors import USERS_OF_ONE, handle_of, users_of

_add_blocks = Function("add_blocks", "llpp")


def add_up(gradients: Sequence[torch.Tensor | None], shards: int) -> list[torch.Tensor | None]:
    """Add up the gradients of shards in the canonical tree.

    Args:
        gradients: tensors that stand for the shards, or are the same for all; they are not read
            again. None stays None.
        shards: the number of shards.

    Returns:
        The sums, each in memory of its own.

    Raises:
        NotTogetherError: a gradient is sparse, or not of float32.
    """
    own = [None if one is None else _with_own_memory(one, shards) for one in gradients]
    dense = [one for one in own if one is not None and one.numel()]
    begins = array.array("l", [one.data_ptr() for one in dense])
    sizes = array.array("l", [one.numel() for one in dense])
    _add_blocks(len(dense), shards, begins.buffer_info()[0], sizes.buffer_info()[0])
    for one in dense:
        storage: Any = one.untyped_storage()
        storage._evenstep_blocks = None
        storage.resize_(one.nbytes)
    return own


def _with_own_memory(gradient: torch.Tensor, shards: int) -> torch.Tensor:
    """Return a gradient whose blocks are contiguous, in a storage that nobody else uses."""
    blocks = blocks_of(gradient)
    if gradient.dtype is not torch.float32:
        raise NotTogetherError(f"a gradient of {gradient.dtype}")
    storage = gradient.untyped_storage()
    if (
        blocks is not None
        and gradient.nbytes == blocks.nbytes
        and gradient.is_contiguous()
        and users_of(handle_of(storage)) == USERS_OF_ONE
    ):
        return gradient
    return of_shards(torch.stack([*shards_of(gradient, shards)]), shards)
