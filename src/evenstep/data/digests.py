"""Checksums of batches and of examples, which tell data apart."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import optree
import torch
from torch.utils.data import DataLoader, Dataset

from evenstep.batch import Batch

COMPARED = 4
"""Examples of an epoch's first batch that stand for a data set whose examples are computed."""


def digest_of(batch: Batch) -> int:
    """Return a checksum of a batch: of its nesting, its tensors, and its plain values."""
    leaves, structure = optree.tree_flatten(batch, none_is_leaf=True)
    digest = zlib.crc32(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
            plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest = zlib.crc32(f"{leaf.dtype} {tuple(leaf.shape)}".encode(), digest)
            digest = zlib.crc32(plain.view(torch.uint8).numpy().data, digest)
        else:
            is_plain = isinstance(leaf, str | int | float | bool | None)
            digest = zlib.crc32((repr(leaf) if is_plain else type(leaf).__name__).encode(), digest)
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
    examples = getattr(fetched, "examples", fetched)
    return digest_of(optree.tree_map(_comparable, examples, none_is_leaf=True))


def _comparable(leaf: Any) -> Any:
    """Return what tells arrays, images and bytes apart."""
    if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "__array_interface__"):
        return zlib.crc32(leaf) if isinstance(leaf, bytes | bytearray) else leaf
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        return type(leaf).__name__
    return f"{array.dtype} {array.shape}", zlib.crc32(array.tobytes())


def _as_lists(index: Any) -> Any:
    if isinstance(index, list | tuple):
        return [*map(_as_lists, index)]
    return index.tolist() if hasattr(index, "tolist") else index
