"""Checksums of examples and batches, which tell data apart."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import optree
import torch
from torch.utils.data import DataLoader, Dataset

COMPARED = 4
"""Examples of an epoch's first batch that stand for a data set whose examples are computed."""


def digest_of(batch: Any) -> int:
    """Return a checksum of a batch or an example: of its nesting, its arrays and plain values."""
    leaves, structure = optree.tree_flatten(batch, none_is_leaf=True)
    digest = zlib.crc32(str(structure).encode())
    for leaf in leaves:
        digest = zlib.crc32(_bytes_of(leaf), digest)
    return digest


def digest_of_index(index: Any, before: int = 0) -> int:
    """Return a checksum of what a sampler gave, after what has the checksum `before`."""
    return zlib.crc32(repr(_as_lists(index)).encode(), before)


def digest_of_fetched(examples: Dataset[Any], wanted: Any, **workers: Any) -> int | None:
    """Fetch some examples twice; return their checksum, or None if the two differ.

    Then they draw from a generator that can't be seeded, or change by themselves, so that they tell
    nothing about the data set.

    Args:
        examples: the data set, with seeded generators.
        wanted: what to ask it for.
        workers: the arguments of a `DataLoader` for worker processes, of which one is started.
    """
    generator = torch.Generator().manual_seed(0)  # else it draws from the default one
    options = {"collate_fn": _digest, "generator": generator, **workers}
    first, again = DataLoader(examples, batch_sampler=[wanted, wanted], **options)
    return first if first == again else None


def _digest(fetched: Any) -> int:
    return digest_of(fetched.examples)


def _bytes_of(leaf: Any) -> bytes:
    """Return the content of a leaf as bytes; of one that can't be read, its type."""
    if isinstance(leaf, bytes | bytearray):
        return bytes(leaf)
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = plain.view(torch.uint8).numpy().tobytes()
        return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + content
    if hasattr(leaf, "__array_interface__"):  # numpy's arrays, and images
        array = np.asarray(leaf)
        if not array.dtype.hasobject:
            return f"{array.dtype} {array.shape}".encode() + array.tobytes()
    is_plain = isinstance(leaf, str | int | float | bool | None)
    return (repr(leaf) if is_plain else type(leaf).__name__).encode()


def _as_lists(index: Any) -> Any:
    if isinstance(index, list | tuple):
        return [*map(_as_lists, index)]
    return index.tolist() if hasattr(index, "tolist") else index
