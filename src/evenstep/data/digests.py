"""Checksums of examples and batches, and of orders."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import optree
import torch

from evenstep.devices.addresses import bytes_of


def digest_of_batch(batch: Any) -> int:
    """Return a checksum of a batch or an example: of its nesting, its arrays and plain values."""
    leaves, structure = optree.tree_flatten(batch, none_is_leaf=True)
    digest = zlib.crc32(str(structure).encode())
    for leaf in leaves:
        digest = zlib.crc32(_bytes_of(leaf), digest)
    return digest


def _bytes_of(leaf: Any) -> bytes:
    """Return the content of a leaf as bytes; of one that can't be read, its type."""
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + bytes_of(leaf).numpy().tobytes()
    if hasattr(leaf, "__array_interface__"):  # numpy's arrays, and images
        array = np.asarray(leaf)
        if not array.dtype.hasobject:
            return f"{array.dtype} {array.shape}".encode() + array.tobytes()
    is_plain = isinstance(leaf, str | int | float | bool | None)
    return (repr(leaf) if is_plain else type(leaf).__name__).encode()


def digest_of_index(index: Any, before: int = 0) -> int:
    """Return a checksum of what a sampler gave, after what has the checksum `before`."""
    return zlib.crc32(repr(_as_lists(index)).encode(), before)


def _as_lists(index: Any) -> Any:
    if isinstance(index, list | tuple):
        are_plain = {int}.issuperset(map(type, index))
        return [*index] if are_plain else [*map(_as_lists, index)]
    return index.tolist() if hasattr(index, "tolist") else index
