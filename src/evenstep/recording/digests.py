"""What is kept of a tensor: digests of its bits, and a few statistics.

A digest is made of sums over the bits, as 64-bit integers, of all rows and of all columns: a few
passes at the speed of memory. The digest of a set of rows is a sum over the rows, so that of a
batch in one process equals the sum of those of its parts in several.

A sketch is a few sums of the values with random signs: the mean square of the differences between
two sketches is in expectation the squared distance of the tensors (Alon, Matias and Szegedy, "The
space complexity of approximating the frequency moments", 1996).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from evenstep.devices.addresses import row_major

_COLUMNS = 2048
_COLUMNS_OF_ROW = 256
_SKETCHED = 8
"""The number of sums in a sketch."""

_MOST_FILLED = 1 << 22
"""The largest sparse tensor, by its elements, that is filled with zeros."""

_PART = 1 << 18
"""The number of values that are added up in their own dtype."""

_IN_RANGE = 1e-15, 1e15
"""The largest values whose squares can be added in float32."""

_DIGEST_NBYTES = 8
_MOST_VALUES_NBYTES = 1 << 16
_FIRST = 4
_SAMPLED = 15
"""The number of values of an example that are kept, less one."""


class Picked(NamedTuple):
    """The example that is looked at more closely: it depends on the examples, not on their order.

    `key` is the least checksum of a row, and `row` its place.
    """

    key: int
    row: int


KeptAndPicked: TypeAlias = tuple[list[Any], Picked | None]


class _Bits(NamedTuple):
    """The digest of a tensor's bits and, if it has examples, of the set of its rows."""

    digest: str
    rows: str | None
    picked: Picked | None


class RecentlyKept:
    """What was kept of tensors that are still there: most are seen twice.

    What a module gives goes into the next one, and a gradient stays what it was. A tensor is known
    by its identity and its bits: not all that writes to it counts in its version.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], Any, KeptAndPicked]] = {}

    def kept_of(self, tensor: torch.Tensor, examples: int | None = None) -> list[Any]:
        """Return what is kept of a tensor."""
        return self.kept_and_picked(tensor, examples)[0]

    def kept_by_name(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Return what is kept of tensors."""
        return {name: self.kept_of(one) for name, one in named}

    def kept_and_picked(self, tensor: torch.Tensor, examples: int | None = None) -> KeptAndPicked:
        """Return what is kept of a tensor, and which of its examples to look at.

        Args:
            tensor: any tensor.
            examples: the size of its first dimension if that is the batch; None for a tensor
                without examples, such as a weight.

        Returns:
            [digest of the bits, digest of the set of rows or None, shape, dtype, sum, sum of
            squares, largest absolute value, number of NaN, sketch]. The last five are None where
            numbers can't be added, the digests where the values can't be read, and the sketch of a
            tensor that has examples. The example is None where there are none.
        """
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        key = id(tensor)
        try:
            dense = _dense(tensor)
            bits = _bits_of(dense, tensor, examples)
            state = bits, examples
            known, before, kept = self._found.get(key, (None, None, None))
            if kept is None or known is None or known() is not tensor or before != state:
                statistics = _statistics(dense, has_sketch=examples is None)
                kept = [bits.digest, bits.rows, shape, dtype, *statistics], bits.picked
                known = weakref.ref(tensor, lambda _: self._found.pop(key, None))
                self._found[key] = (known, state, kept)
        except (RuntimeError, NotImplementedError):  # inside of a transform of torch.func
            return [None, None, shape, dtype, *_NO_STATISTICS], None
        return kept


def _bits_of(dense: torch.Tensor, tensor: torch.Tensor, examples: int | None) -> _Bits:
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    digest.update(repr((tuple(dense.shape), str(dense.dtype))).encode())
    if examples is not None and dense.dim() > 0 and len(dense) == examples:
        rows = _checksums_of_rows(dense)
        digest.update(rows.tobytes())
        return _Bits(digest.hexdigest(), _sum_of_set(rows), _picked(rows))
    digest.update(_sums_of_bits(dense))
    if _is_sparse(tensor):
        places = tensor.detach().to_sparse_coo().coalesce().indices()
        digest.update(_sums_of_bits(places.to("cpu").contiguous()))
    return _Bits(digest.hexdigest(), None, None)


@torch.no_grad()
def sample_of(tensor: torch.Tensor, row: int, examples: int | None) -> list[float | str]:
    """Return some values of an example, equally far apart; none of a tensor without examples."""
    try:
        dense = _dense(tensor)
        if dense.dim() == 0 or len(dense) != examples or not dense.is_floating_point():
            return []
        flat = dense[row].reshape(-1)
        return [*map(number_in_json, flat[:: len(flat) // _SAMPLED + 1].double().tolist())]
    except (RuntimeError, NotImplementedError):
        return []


@torch.no_grad()
def values_of(tensor: torch.Tensor) -> str | None:
    """Return the first 64 KiB of a tensor's values: bytes in C order, as base64; None without."""
    try:
        flat = _dense(tensor).reshape(-1)
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


@torch.no_grad()
def digest_of_starts(tensors: Iterable[torch.Tensor], examples: int) -> str:
    """Return a digest of the set of the first values of each example, such as a text's first words.

    It is the same however far examples are filled up behind.
    """
    found = 0
    with contextlib.suppress(RuntimeError, NotImplementedError):
        for one in map(_dense, tensors):
            if one.dim() > 1 and len(one) == examples:
                found += int(_sum_of_set(_checksums_of_rows(one[:, :_FIRST].contiguous())), 16)
    return f"{found % (1 << 64):x}"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as plain values on the CPU; of a large sparse one those that are not zero."""
    dense = tensor.detach()
    if _is_sparse(dense):
        dense = dense.to_sparse_coo().coalesce().values()
    elif dense.layout is not torch.strided:
        dense = dense.to_dense()
    return row_major(dense)


def _is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sparse, and larger than what is filled with zeros to look at it."""
    return tensor.layout is not torch.strided and tensor.numel() > _MOST_FILLED


def _rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each row of a tensor, as bytes."""
    return _bytes_of(tensor.detach().to("cpu").contiguous().reshape(len(tensor), -1))


_NO_STATISTICS = (None, None, None, None, None)


def _statistics(dense: torch.Tensor, *, has_sketch: bool) -> tuple[Any, ...]:
    """Return sum, sum of squares, largest absolute value, number of NaN, and sketch."""
    if not dense.is_floating_point() or dense.numel() == 0:
        return _NO_STATISTICS
    flat = dense.reshape(-1)
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    largest = float(max(map(abs, flat.aminmax())))
    if not _IN_RANGE[0] < largest < _IN_RANGE[1]:
        flat = flat.double()
    parts = flat.split(_PART) if len(flat) > _PART else (flat,)
    total, squares = (
        math.fsum(map(float, sums))
        for sums in ((one.sum() for one in parts), (torch.dot(one, one) for one in parts))
    )
    nans = 0 if math.isfinite(squares) else int(flat.isnan().sum())
    sketch = _sketch(flat) if has_sketch and math.isfinite(squares) else None
    return number_in_json(total), number_in_json(squares), number_in_json(largest), nans, sketch


def _sketch(flat: torch.Tensor) -> list[float]:
    """Return sums with random signs, of 9 digits each; first, rows of 2048 are added with signs."""
    folded = flat.double().numpy() if len(flat) <= _COLUMNS else _folded(flat)
    sums = np.einsum("i,ij->j", folded, _signs(_COLUMNS, _SKETCHED)[: len(folded)])
    return [float(f"{one:.8e}") for one in sums.tolist()]


def _folded(flat: torch.Tensor) -> np.ndarray:
    whole = len(flat) - len(flat) % _COLUMNS
    rows, rest = flat[:whole].view(-1, _COLUMNS), flat[whole:]
    signs = torch.from_numpy(_signs(1 << len(rows).bit_length())[: len(rows)]).to(rows.dtype)
    folded: np.ndarray = torch.mv(rows.T, signs).double().numpy()
    folded[: len(rest)] += rest.numpy()
    return folded


@functools.lru_cache
def _signs(*shape: int) -> np.ndarray:
    """Return 1 and -1 at random, the same in every process, as float64."""
    bits = _mixed(math.prod(shape)) >> np.uint64(63)
    return np.where(bits == 0, 1.0, -1.0).reshape(shape)


@functools.lru_cache
def _mixed(count: int) -> np.ndarray:
    """Return the first numbers of SplitMix64 as uint64 (Steele, Lea and Flood, 2014)."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Return the output function of SplitMix64 of numbers of uint64, which wrap around."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = numbers ^ (numbers >> np.uint64(31))
    return mixed


def number_in_json(value: float) -> float | str:
    """Return a number as JSON can hold it."""
    return value if math.isfinite(value) else str(value)


def _sums_of_bits(dense: torch.Tensor) -> bytes:
    """Return the bits of few values; of many, two numbers that depend on each bit and its place.

    They are sums over the rows and over the columns of a rectangle, each times a number of its own.
    """
    words = _words_of(dense.reshape(-1))
    if len(words) <= _COLUMNS:
        return words.numpy().tobytes()
    whole = len(words) - len(words) % _COLUMNS
    rectangle, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    columns = _spread(rectangle, dense.dtype).sum(0)
    rows = torch.cat([rectangle.sum(1), rest.sum()[None]])
    columns[: len(rest)] += _spread(rest, dense.dtype)
    sums = [np.dot(one.numpy(), _factors(len(one))) for one in (columns, rows)]
    return np.array(sums).tobytes()


def _checksums_of_rows(dense: torch.Tensor) -> np.ndarray:
    """Return a number for each row, as uint64: a sum over its bits, each times a number."""
    rows = dense.reshape(len(dense), -1)
    if rows.numel() == 0:
        return np.zeros(len(rows), dtype=np.uint64)
    words = _bytes_of(rows)
    if words.shape[1] % 8:
        words = torch.nn.functional.pad(words, (0, -words.shape[1] % 8))
    words = words.view(torch.int64)
    spread = _spread(words, dense.dtype)
    whole = words.shape[1] - words.shape[1] % _COLUMNS_OF_ROW
    if whole >= 4 * _COLUMNS_OF_ROW:
        shape = (len(words), -1, _COLUMNS_OF_ROW)
        columns, lines = (one[:, :whole].reshape(shape) for one in (spread, words))
        spread = torch.cat([columns.sum(1), lines.sum(2), spread[:, whole:]], 1)
    checksums = (spread * torch.from_numpy(_factors(spread.shape[1]))).sum(1)
    return _mix(checksums.numpy().view(np.uint64))


def _sum_of_set(rows: np.ndarray) -> str:
    """Return the digest of a set of rows: the sum of their checksums, mod 2**64."""
    return f"{int(rows.sum()):x}"


def _picked(rows: np.ndarray) -> Picked | None:
    """Return the row with the least checksum; None if there is nothing in any row."""
    row = int(rows.argmin()) if rows.any() else None
    return None if row is None else Picked(int(rows[row]), row)


def _spread(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return words in which a change of a number's sign changes lower bits, too.

    Sums are modulo 2**64, and a sign may be the uppermost bit: if two signs change in the same sum,
    it stays the same.
    """
    if dtype.itemsize >= 8:
        return (words >> 32).add_(words)
    return words.abs() if dtype.is_floating_point else words


def _factors(count: int) -> np.ndarray:
    """Return odd numbers, as int64."""
    return _odd(1 << count.bit_length())[:count]


@functools.lru_cache
def _odd(count: int) -> np.ndarray:
    odd: np.ndarray = _mixed(count) | np.uint64(1)
    return odd.view(np.int64)


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
