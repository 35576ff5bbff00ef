"""What is kept of a tensor: digests of its bits, and a few statistics.

A digest is made of sums over the bits, as 64-bit integers, of all rows and of all columns: two
passes at the speed of memory. The digest of a set of rows is a sum over the rows, so that of a
batch in one process equals the sum of those of its parts in several.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

ROWS_MODULUS = 1 << 64

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; of the golden ratio, as in Fibonacci hashing
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 2048
_DIGEST_NBYTES = 8
_MOST_VALUES_NBYTES = 1 << 16
_SAMPLED = 15
"""The number of values of an example that are kept, less one."""


class Picked(NamedTuple):
    """The example that is looked at more closely: it depends on the examples, not on their order.

    Attributes:
        key: the least checksum of a row.
        row: its place.
    """

    key: int
    row: int


def kept_of(tensor: torch.Tensor, *, examples: int | None = None) -> list[Any]:
    """Return what is kept of a tensor; the arguments are those of `kept_and_picked`."""
    return kept_and_picked(tensor, examples)[0]


@torch.no_grad()
def kept_and_picked(
    tensor: torch.Tensor, examples: int | None = None
) -> tuple[list[Any], Picked | None]:
    """Return what is kept of a tensor, and which of its examples to look at.

    Args:
        tensor: any tensor.
        examples: the size of its first dimension if that is the batch; None for a tensor without
            examples, such as a weight.

    Returns:
        [digest of the bits, digest of the set of rows or None, shape, dtype, sum, sum of squares,
        largest absolute value, number of NaN]. The last four are None where numbers can't be
        added, and the digests are None where the values can't be read. The example is None where
        there are none.
    """
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    try:
        dense = _dense(tensor)
        has_rows = examples is not None and dense.dim() > 0 and len(dense) == examples
        rows, picked = _digest_of_rows(dense) if has_rows else (None, None)
        return [_digest(dense), rows, shape, dtype, *_statistics(dense)], picked
    except (RuntimeError, NotImplementedError):  # inside of a transform of torch.func, for example
        return [None, None, shape, dtype, None, None, None, None], None


@torch.no_grad()
def sample_of(tensor: torch.Tensor, row: int, examples: int | None) -> list[float | str]:
    """Return some values of an example, equally far apart; none of a tensor without examples."""
    try:
        dense = _dense(tensor)
        if dense.dim() == 0 or len(dense) != examples or not dense.is_floating_point():
            return []
        flat = dense[row].reshape(-1)
        return [*map(_number, flat[:: len(flat) // _SAMPLED + 1].double().tolist())]
    except (RuntimeError, NotImplementedError):
        return []


@torch.no_grad()
def digest_of(tensor: torch.Tensor) -> str | None:
    """Return the digest of a tensor's bits that `kept_of` keeps."""
    try:
        return _digest(_dense(tensor))
    except (RuntimeError, NotImplementedError):
        return None


@torch.no_grad()
def values_of(tensor: torch.Tensor) -> str | None:
    """Return the first 64 KiB of a tensor's values: bytes in C order, as base64; None without."""
    try:
        flat = _dense(tensor).contiguous().reshape(-1)
        first = flat[: _MOST_VALUES_NBYTES // flat.element_size()]
        return base64.b64encode(_bytes_of(first).numpy().tobytes()).decode()
    except (RuntimeError, NotImplementedError):
        return None


@torch.no_grad()
def digests_of_examples(tensors: Iterable[torch.Tensor], examples: int) -> list[str]:
    """Return a digest of each example: of its row in all tensors that have one for each example.

    Returns:
        16 hexadecimal digits for each; nothing if the values can't be read.
    """
    try:
        rows = [_rows_of(one) for one in tensors if one.dim() > 0 and len(one) == examples]
    except (RuntimeError, NotImplementedError):
        return []
    digests = []
    for number in range(examples):
        digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        for part in rows:
            digest.update(part[number].numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as plain values on the CPU."""
    dense = tensor.detach()
    dense = dense if dense.layout is torch.strided else dense.to_dense()
    return dense.to("cpu").resolve_conj().resolve_neg()


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each row of a tensor, as bytes."""
    return _bytes_of(tensor.detach().to("cpu").contiguous().reshape(len(tensor), -1))


def _statistics(dense: torch.Tensor) -> list[Any]:
    if not dense.is_floating_point() or dense.numel() == 0:
        return [None, None, None, None]
    values = dense if dense.dtype in (torch.float32, torch.float64) else dense.float()
    squares = float(torch.linalg.vector_norm(values, dtype=torch.float64).square())
    largest = float(torch.linalg.vector_norm(values, math.inf))
    nans = 0 if math.isfinite(squares) else int(values.isnan().sum())
    return [
        _number(float(values.sum(dtype=torch.float64))),
        _number(squares),
        _number(largest),
        nans,
    ]


def _number(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)


def _digest(dense: torch.Tensor) -> str:
    """Return a digest of the bits: of the sums over the rows and columns of a rectangle."""
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    digest.update(repr((tuple(dense.shape), str(dense.dtype))).encode())
    words = _words_of(dense.contiguous().reshape(-1))
    whole = len(words) - len(words) % _COLUMNS
    if whole:
        rectangle = words[:whole].reshape(-1, _COLUMNS)
        digest.update(rectangle.sum(0).numpy().tobytes())
        digest.update(rectangle.sum(1).numpy().tobytes())
    digest.update(words[whole:].numpy().tobytes())
    return digest.hexdigest()


def _digest_of_rows(dense: torch.Tensor) -> tuple[str, Picked | None]:
    """Return the digest of a set of rows, and the row with the least checksum.

    The digest is the sum over mixed checksums of the rows, mod 2**64.
    """
    rows = dense.contiguous().reshape(len(dense), -1)
    if rows.numel() == 0:
        return "0", None
    words = _bytes_of(rows)
    if words.shape[1] % 8:
        words = torch.nn.functional.pad(words, (0, -words.shape[1] % 8))
    words = words.view(torch.int64)
    half = (words.shape[1] + 1) // 2
    checksums = words.sum(1) + 3 * words[:, :half].sum(1) + 5 * words[:, ::2].sum(1)
    mixed = (checksums ^ (checksums >> 29)) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 32)) * _MULTIPLIER
    least = mixed.min(0)
    picked = Picked(int(least.values), int(least.indices))
    return f"{int(mixed.sum()) % ROWS_MODULUS:x}", picked


def _words_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of a flat tensor as int64; the last word is filled with zeros."""
    flat = _bytes_of(flat)
    if len(flat) % 8:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % 8))
    return flat.view(torch.int64)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a contiguous tensor as bytes; its last dimension grows."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten(-2)
    if tensor.storage_offset() * tensor.itemsize % 8 or tensor.data_ptr() % 8:
        tensor = tensor.clone()
    return tensor.view(torch.uint8)
