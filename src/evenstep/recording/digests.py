"""What is kept of a tensor: digests of its bits, and a few statistics.

A digest is made of sums over the bits, as 64-bit integers, of all rows and of all columns: two
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

from evenstep.private_torch.tensors import version_of

_COLUMNS = 2048
_COLUMNS_OF_ROW = 256
_SKETCHED = 8
"""The number of sums in a sketch."""

_MOST_FILLED = 1 << 22
"""The largest sparse tensor, by its elements, that is filled with zeros."""

_FEW = 1 << 15
"""Up to so many values are added without a thread of another core."""

_IN_RANGE = 1e-15, 1e15
"""The largest values whose squares can be added in float32."""

_DIGEST_NBYTES = 8
_MOST_VALUES_NBYTES = 1 << 16
_FIRST = 4
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


KeptAndPicked: TypeAlias = tuple[list[Any], Picked | None]


class RecentlyKept:
    """What was kept of tensors that are still there: most are seen twice.

    What a module gives goes into the next one, and a gradient stays what it was. A tensor is known
    by its identity, its version and a checksum: not all that writes to it counts in its version.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, ...]] = {}

    def kept_of(self, tensor: torch.Tensor, examples: int | None = None) -> list[Any]:
        """Return what is kept of a tensor."""
        return self.kept_and_picked(tensor, examples)[0]

    def kept_by_name(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Return what is kept of tensors."""
        return {name: self.kept_of(one) for name, one in named}

    def kept_and_picked(self, tensor: torch.Tensor, examples: int | None = None) -> KeptAndPicked:
        """Return what `kept_and_picked` returns."""
        try:
            state = version_of(tensor), tensor.data_ptr(), examples, _checksum(tensor)
        except (RuntimeError, NotImplementedError):  # of inference mode, or without values
            return kept_and_picked(tensor, examples)
        key = id(tensor)
        known, *before, kept = self._found.get(key, (None, None))
        if known is None or known() is not tensor or (*before,) != state:
            kept = kept_and_picked(tensor, examples)
            known = weakref.ref(tensor, lambda _: self._found.pop(key, None))
            self._found[key] = (known, *state, kept)
        return kept  # type: ignore[no-any-return]


@torch.no_grad()
def kept_and_picked(tensor: torch.Tensor, examples: int | None = None) -> KeptAndPicked:
    """Return what is kept of a tensor, and which of its examples to look at.

    Args:
        tensor: any tensor.
        examples: the size of its first dimension if that is the batch; None for a tensor without
            examples, such as a weight.

    Returns:
        [digest of the bits, digest of the set of rows or None, shape, dtype, sum, sum of squares,
        largest absolute value, number of NaN, sketch]. The last five are None where numbers can't
        be added, the digests where the values can't be read, and the sketch of a tensor that has
        examples. The example is None where there are none.
    """
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    try:
        dense = _dense(tensor)
        has_rows = examples is not None and dense.dim() > 0 and len(dense) == examples
        rows, picked = _digest_of_rows(dense) if has_rows else (None, None)
        statistics = _statistics(dense, has_sketch=examples is None)
        digest = _digest(dense)
        if _is_sparse(tensor):
            digest += _digest(tensor.detach().to_sparse_coo().coalesce().indices().to("cpu"))
        return [digest, rows, shape, dtype, *statistics], picked
    except (RuntimeError, NotImplementedError):  # inside of a transform of torch.func, for example
        return [None, None, shape, dtype, *_NO_STATISTICS], None


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


@torch.no_grad()
def digest_of_starts(tensors: Iterable[torch.Tensor], examples: int) -> str:
    """Return a digest of the set of the first values of each example, such as a text's first words.

    It is the same however far examples are filled up behind.
    """
    found = 0
    with contextlib.suppress(RuntimeError, NotImplementedError):
        for one in map(_dense, tensors):
            if one.dim() > 1 and len(one) == examples:
                found += int(_digest_of_rows(one[:, :_FIRST])[0], 16)
    return f"{found % (1 << 64):x}"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as plain values on the CPU; of a large sparse one those that are not zero."""
    dense = tensor.detach()
    if _is_sparse(dense):
        dense = dense.to_sparse_coo().coalesce().values()
    elif dense.layout is not torch.strided:
        dense = dense.to_dense()
    return dense.to("cpu").resolve_conj().resolve_neg()


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
    flat = dense.contiguous().reshape(-1)
    sums = _sums_of_many(flat) if len(flat) > _FEW else _sums_of_few(flat.double().numpy())
    nans = 0 if math.isfinite(sums.squares) else int(flat.isnan().sum())
    sketch = _sketch(sums.folded) if has_sketch and math.isfinite(sums.squares) else None
    return _number(sums.total), _number(sums.squares), _number(sums.largest), nans, sketch


class _Sums(NamedTuple):
    """Sums over all values; `folded` are up to 2048 sums with random signs, as float64."""

    total: float
    squares: float
    largest: float
    folded: np.ndarray


def _sums_of_few(values: np.ndarray) -> _Sums:
    """Add up float64, in this thread."""
    folded = values
    if len(values) > _COLUMNS:
        whole = len(values) - len(values) % _COLUMNS
        rows, rest = values[:whole].reshape(-1, _COLUMNS), values[whole:]
        folded = np.einsum("ij,i->j", rows, _signs(_FEW)[: len(rows)])
        folded[: len(rest)] += rest
    squares = np.einsum("i,i", values, values)
    return _Sums(float(values.sum()), float(squares), float(np.abs(values).max()), folded)


def _sums_of_many(flat: torch.Tensor) -> _Sums:
    """Add up rows of 2048 in float32, and the rows in float64."""
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    largest = float(max(map(abs, flat.aminmax())))
    if not _IN_RANGE[0] < largest < _IN_RANGE[1]:
        flat = flat.double()
    whole = len(flat) - len(flat) % _COLUMNS
    rows, rest = flat[:whole].reshape(-1, _COLUMNS), flat[whole:].double().numpy()
    signs = torch.from_numpy(_signs(1 << len(rows).bit_length())[: len(rows)]).to(rows.dtype)
    folded = torch.mv(rows.T, signs).double().numpy()
    folded[: len(rest)] += rest
    of_rows = rows.sum(1).double().numpy(), torch.linalg.vector_norm(rows, dim=1).double().numpy()
    total, squares = (
        of_rows[0].sum() + rest.sum(),
        np.square(of_rows[1]).sum() + np.square(rest).sum(),
    )
    return _Sums(float(total), float(squares), largest, folded)


def _sketch(folded: np.ndarray) -> list[float]:
    """Return sums with random signs, of 9 digits each."""
    sums = np.einsum("i,ij->j", folded, _signs(_COLUMNS, _SKETCHED)[: len(folded)])
    return [float(f"{one:.8e}") for one in sums.tolist()]


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
    whole = words.shape[1] - words.shape[1] % _COLUMNS_OF_ROW
    if whole >= 4 * _COLUMNS_OF_ROW:
        rectangles = words[:, :whole].reshape(len(words), -1, _COLUMNS_OF_ROW)
        words = torch.cat([rectangles.sum(1), rectangles.sum(2), words[:, whole:]], 1)
    multipliers = _mixed(1 << words.shape[1].bit_length())[: words.shape[1]] | np.uint64(1)
    checksums = (words * torch.from_numpy(multipliers.view(np.int64))).sum(1)
    mixed = _mix(checksums.numpy().view(np.uint64))
    row = int(mixed.argmin())
    return f"{int(mixed.sum()):x}", Picked(int(mixed[row]), row)


def _checksum(tensor: torch.Tensor) -> int:
    """Return sums of a tensor's bits, as integers: of all, of one half, and of each second word."""
    flat = tensor.detach()
    extent = 1 + sum((n - 1) * step for n, step in zip(flat.shape, flat.stride(), strict=True))
    is_dense = extent == flat.numel()
    flat = flat.as_strided((extent,), (1,)) if is_dense else flat.contiguous().reshape(-1)
    words = _words_of(flat)
    half, each_second = words[: len(words) // 2], words[::2]
    return int(words.sum()) + 3 * int(half.sum()) + 5 * int(each_second.sum())


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
