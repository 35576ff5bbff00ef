"""Tensors that stand for the tensors of several shards.

Such a tensor is that of the first shard; those of the others lie behind it in the same storage, at
equal distances. So its shape, its views and its dtype are those of a shard, and autograd, modules
and the user's code see nothing else. The storage knows how many shards it has: views and saved
tensors share it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from evenstep.errors import EvenstepError


class NotTogetherError(EvenstepError):
    """Some code can't run for several shards at once; it is run for each by itself."""


class Blocks(NamedTuple):
    """How a storage is divided.

    Attributes:
        shards: the number of shards, each with a block of the storage.
        nbytes: the bytes of a block.
    """

    shards: int
    nbytes: int


def blocks_of(tensor: torch.Tensor) -> Blocks | None:
    """Return how a tensor's storage is divided; None if the tensor is the same for all shards."""
    if tensor.layout is not torch.strided:
        raise NotTogetherError("a sparse tensor")
    return getattr(tensor.untyped_storage(), "_evenstep_blocks", None)


def is_of_shards(value: object) -> bool:
    """Whether a value is a tensor that stands for those of several shards."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return blocks_of(value) is not None


def whole(tensor: torch.Tensor, blocks: Blocks, ndim: int = 0) -> torch.Tensor:
    """Return the tensors of all shards as one, whose first dimension counts the shards.

    Args:
        tensor: that of the first shard.
        blocks: how its storage is divided.
        ndim: the number of its dimensions to have at least: ones are put before its own.
    """
    size: tuple[int, ...] = tensor.shape
    strides = tensor.stride()
    missing = ndim - len(size)
    if missing > 0:
        ones = (1,) * missing
        size, strides = (*ones, *size), (*ones, *strides)
    return tensor.as_strided((blocks.shards, *size), (blocks.nbytes // tensor.itemsize, *strides))


def of_shard(tensor: torch.Tensor, blocks: Blocks, shard: int) -> torch.Tensor:
    """Return the tensor of one shard, as a plain view."""
    at = tensor.storage_offset() + shard * (blocks.nbytes // tensor.itemsize)
    return tensor.as_strided(tensor.shape, tensor.stride(), at)


def shards_of(tensor: torch.Tensor, shards: int) -> torch.Tensor:
    """Return the tensors of all shards as one; the first dimension counts the shards."""
    blocks = blocks_of(tensor)
    return tensor.expand(shards, *tensor.shape) if blocks is None else whole(tensor, blocks)


def of_shards(tensor: torch.Tensor, shards: int, examples: int | None = None) -> torch.Tensor:
    """Return the tensor that stands for shards, from those of all shards as one.

    Args:
        tensor: a new tensor, which nobody else holds. Its first dimension counts the shards.
        shards: the number of shards.
        examples: the rows of a shard, where the first dimension counts the rows of all instead.
    """
    storage = tensor.untyped_storage()
    stride = tensor.stride(0) if examples is None else examples * tensor.stride(0)
    nbytes = stride * tensor.itemsize
    size = tensor.shape[1:] if examples is None else (examples, *tensor.shape[1:])
    strides = tensor.stride()[1:] if examples is None else tensor.stride()
    if tensor.storage_offset() or storage.nbytes() != shards * nbytes or _is_marked(storage):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        storage, strides = tensor.untyped_storage(), _contiguous(tuple(size))
        nbytes = math.prod(size) * tensor.itemsize
    storage._evenstep_blocks = Blocks(shards, nbytes)  # type: ignore[attr-defined]
    return tensor.as_strided(size, strides)


def flat_of_shards(tensor: torch.Tensor, shards: int, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that stands for shards, in the form of another one.

    Args:
        tensor: a new tensor, which nobody else holds, with the elements of all shards in a row.
        shards: the number of shards.
        like: a contiguous tensor of a shard.
    """
    storage: Any = tensor.untyped_storage()
    nbytes = like.numel() * tensor.itemsize
    if storage.nbytes() != shards * nbytes or _is_marked(storage):
        tensor = tensor.clone()
        storage = tensor.untyped_storage()
    storage._evenstep_blocks = Blocks(shards, nbytes)
    return tensor.as_strided(like.shape, like.stride())


def divide(tensor: torch.Tensor, shards: int) -> Blocks:
    """Give each of the shards a copy of a tensor's storage, also for the tensors that share it."""
    storage: Any = tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(shards * nbytes)
    copies = torch.empty(0, dtype=torch.uint8).set_(storage).view(shards, nbytes)
    copies[1:] = copies[0]
    storage._evenstep_blocks = Blocks(shards, nbytes)
    return storage._evenstep_blocks


def _is_marked(storage: Any) -> bool:
    return getattr(storage, "_evenstep_blocks", None) is not None


@functools.lru_cache(maxsize=4096)
def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[at + 1 :]) for at in range(len(size)))
