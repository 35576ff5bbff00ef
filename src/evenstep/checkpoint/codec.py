"""Encodes a tree of Python values and tensors as JSON and named tensors, exactly, without pickle.

A *tree* is any nesting of dicts, lists and tuples whose leaves are None, bool, int, float, complex,
str and tensors. `encode` splits it into one JSON value and its tensors; `decode` rebuilds it.

    None, bool, str, int, finite float   as they are: Python writes digits that read back exactly
    list                                 a list
    dict whose keys are plain str        an object, in the order of the dict
    everything else                      an object of one key that starts with `$`, see `_DECODERS`

A dict with a key that starts with `$` becomes a `$dict` of pairs, so that no dict of the caller can
be mistaken for a marker.

Not kept are: a tensor's device (it comes back on the CPU) and `requires_grad`; that two leaves were
one object or shared memory; attributes set on a container, such as the `_metadata` of a module's
state dict.
"""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from evenstep.devices.addresses import bytes_of, row_major
from evenstep.errors import CheckpointError

Tree: TypeAlias = Any
"""Dicts, lists and tuples of None, bool, int, float, complex, str and tensors, in any nesting."""

Plain: TypeAlias = Any
"""What `json.dumps(..., allow_nan=False)` takes: the encoded tree without its tensors."""


class Encoded(NamedTuple):
    """A tree as one JSON value, and its tensors by name."""

    plain: Plain
    tensors: dict[str, torch.Tensor]


_Path: TypeAlias = tuple[Hashable, ...]
_Fetch: TypeAlias = Callable[[str], torch.Tensor]

_MAX_DEPTH = 100  # far below Python's own recursion limit; a tree that contains itself reaches it
_MAX_NAME = 200  # characters: the header of a safetensors file is bounded
_RESERVED = "__metadata__"  # no tensor of a safetensors file may have this name

# What decoding a value that `encode` did not write may raise.
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, RecursionError, struct.error)

# Every version of safetensors stores these. All other dtypes are stored as bytes (uint8).
_NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def encode(tree: Tree, copy: Callable[[torch.Tensor], torch.Tensor] = row_major) -> Encoded:
    """Split `tree` into a plain JSON value and its tensors by name.

    OrderedDict and defaultdict are kept as dict, `torch.Size` as tuple, `Parameter` as tensor, and
    a numpy number or bool as the Python number that equals it; but numpy's float32 and float16 as
    they are, since they round what is computed with them.

    Args:
        tree: what is encoded.
        copy: returns a tensor's values on the CPU and contiguous. By default the result may share
            memory with the tree, so write it before the tree changes.

    Returns:
        The plain value, and tensors that don't share memory with each other. Dtypes that
        safetensors may not know (complex, float8, ...) are flat uint8 tensors of their bytes.

    Raises:
        CheckpointError: a leaf, key or container of a different kind, a tensor that is sparse,
            quantized, nested or without data, or a tree of more than 100 levels.
    """
    encoder = _Encoder(copy)
    plain = encoder.encode(tree, ())
    return Encoded(plain, _unshare(encoder.tensors))


def decode(plain: Plain, fetch: Callable[[str], torch.Tensor]) -> Tree:
    """Return the tree that `encode` split into `plain` and the tensors that `fetch` finds by name.

    Every tensor comes back on the CPU in freshly allocated memory of its own, with its dtype, shape
    and strides; one that was not dense (expanded, or a slice with gaps) is contiguous.

    Raises:
        CheckpointError: `plain` is not what `encode` writes, or a tensor is missing or not the one
            described. Errors of `fetch` other than KeyError pass through.
    """
    try:
        return _decode(plain, fetch)
    except CheckpointError:
        raise
    except _MALFORMED as error:
        raise CheckpointError(f"got a state that evenstep did not encode: {error!r}") from error


class _Encoder:
    """Encodes values, and collects their tensors."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._copy = copy

    def encode(self, value: Any, path: _Path) -> Plain:
        kind = type(value)
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, _step(path, place)) for place, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (dict, collections.OrderedDict, collections.defaultdict):
            if all(type(key) is str and key[:1] != "$" and _is_unicode(key) for key in value):
                return {key: self.encode(item, _step(path, key)) for key, item in value.items()}
            return {"$dict": self._pairs(value, path)}
        if kind is collections.Counter:
            return {"$counter": self._pairs(value, path)}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return {"$tensor": self._tensor(value, path)}
        if kind in _SHORT_FLOATS:
            return {"$numpy": [kind.__name__, self.encode(value.item(), path)]}
        if _is_numpy_number(value):
            return self.encode(value.item(), path)
        raise CheckpointError(
            f"{_spell(path)} is of type {_type_name(value)}, which a checkpoint can't hold: give "
            f"None, bool, int, float, complex, str, tensors, or lists, tuples and dicts of these, "
            f"or leave it out"
        )

    def _pairs(self, value: dict[Any, Any], path: _Path) -> list[Plain]:
        return [
            [self._key(key, path), self.encode(item, _step(path, key))]
            for key, item in value.items()
        ]

    def _key(self, key: Any, path: _Path) -> Plain:
        if type(key) in (tuple, torch.Size):
            return {"$tuple": [self._key(part, _step(path, key)) for part in key]}
        if type(key) in _SCALARS:
            return self.encode(key, path)
        if _is_numpy_number(key):
            return self.encode(key.item(), path)
        raise CheckpointError(
            f"{_spell(path)} has a key of type {_type_name(key)}, which a checkpoint can't hold: "
            f"use None, bool, int, float, complex, str or tuples of these"
        )

    def _tensor(self, tensor: torch.Tensor, path: _Path) -> Plain:
        _check_tensor(tensor, path)
        name = self._free_name(path)
        values = self._copy(tensor)
        self.tensors[name] = values if values.dtype in _NATIVE else bytes_of(values)
        strides = tensor.stride()
        if not _is_dense(tensor.shape, strides):
            strides = torch.empty(tensor.shape, device="meta").stride()
        return {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(strides),
        }

    def _free_name(self, path: _Path) -> str:
        steps = (step if type(step) is str else repr(step) for step in path)
        name = "/".join(steps).encode("utf-8", "backslashreplace").decode()[:_MAX_NAME]
        while name in self.tensors or name in (_RESERVED, ""):
            name = f"{name}#{len(self.tensors)}"
        return name


def _encode_float(value: float) -> Plain:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> Plain:
    return value if _is_unicode(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}


def _check_tensor(tensor: torch.Tensor, path: _Path) -> None:
    obstacles = {
        f"a {tensor.layout} tensor": tensor.layout != torch.strided,
        "a nested tensor": tensor.is_nested,
        "a quantized tensor": tensor.is_quantized,
        "a tensor without data (device meta)": tensor.is_meta,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise CheckpointError(
                f"{_spell(path)} is {obstacle}, which a checkpoint can't hold: "
                f"store a dense tensor, or leave it out"
            )


def _unshare(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy each tensor that shares memory with an earlier one, which safetensors refuses."""
    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return unshared


def _decode(plain: Plain, fetch: _Fetch) -> Tree:
    if isinstance(plain, list):
        return [_decode(item, fetch) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if not any(key.startswith("$") for key in plain):
        return {key: _decode(item, fetch) for key, item in plain.items()}
    ((marker, content),) = plain.items()
    return _DECODERS[marker](content, fetch)


def _decode_float(digits: str, fetch: _Fetch) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(digits))
    return float(value)


def _decode_complex(parts: list[Plain], fetch: _Fetch) -> complex:
    real, imaginary = _decode(parts, fetch)
    return complex(real, imaginary)


def _decode_numpy(parts: list[Plain], fetch: _Fetch) -> np.floating[Any]:
    name, value = parts
    (kind,) = (one for one in _SHORT_FLOATS if one.__name__ == name)
    number: np.floating[Any] = kind(_decode(value, fetch))
    return number


def _decode_pairs(pairs: list[Any], fetch: _Fetch) -> dict[Any, Tree]:
    return {_decode(key, fetch): _decode(item, fetch) for key, item in pairs}


def _decode_tensor(entry: Plain, fetch: _Fetch) -> torch.Tensor:
    shape, strides = _sizes(entry["shape"]), _sizes(entry["strides"])
    dtype = vars(torch).get(entry["dtype"])  # `getattr` would import modules
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype} is not a dtype")
    stored = fetch(entry["name"])
    if dtype not in _NATIVE and stored.numel() == math.prod(shape) * dtype.itemsize:
        stored = stored.clone().view(dtype).reshape(shape)  # a clone is aligned for every dtype
    if (stored.dtype, tuple(stored.shape)) != (dtype, shape) or not _is_dense(shape, strides):
        raise ValueError(f"{entry} is stored as {stored.dtype} of shape {tuple(stored.shape)}")
    return torch.empty_strided(shape, strides, dtype=dtype).copy_(stored)


def _sizes(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are not sizes or strides")
    return tuple(numbers)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory without gap or overlap."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def _is_numpy_number(value: object) -> bool:
    """Whether `value` is a numpy scalar that equals a Python number (a long double does not)."""
    if isinstance(value, np.timedelta64) or not isinstance(value, np.bool_ | np.number):
        return False
    return type(value.item()) in (bool, int, float, complex)


def _is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogate: JSON would join two of them to one character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _step(path: _Path, key: Hashable) -> _Path:
    if len(path) >= _MAX_DEPTH:
        raise CheckpointError(
            f"{_spell(path[:3])}... nests more than {_MAX_DEPTH} levels deep, or contains itself: "
            f"make it flatter"
        )
    return (*path, key)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _spell(path: _Path) -> str:
    return "state" + "".join(f"[{step!r}]" for step in path)


_SCALARS: dict[type, Callable[[Any], Plain]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: lambda value: value if -(2**63) <= value < 2**63 else {"$int": hex(value)},
    float: _encode_float,
    complex: lambda value: {"$complex": [_encode_float(value.real), _encode_float(value.imag)]},
    str: _encode_str,
}

_SHORT_FLOATS: tuple[type[np.floating[Any]], ...] = (np.float32, np.float16)

_DECODERS: dict[str, Callable[[Any, _Fetch], Tree]] = {
    "$int": lambda digits, fetch: int(digits, 16),
    "$float": _decode_float,  # 16 hexadecimal digits: the bits of the double, big-endian
    "$complex": _decode_complex,  # [real, imaginary]
    "$numpy": _decode_numpy,  # [name of the type, value]
    "$str": lambda digits, fetch: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    "$tuple": lambda items, fetch: tuple(_decode(items, fetch)),
    "$dict": _decode_pairs,  # [[key, value], ...]
    "$counter": lambda pairs, fetch: collections.Counter(_decode_pairs(pairs, fetch)),
    "$tensor": _decode_tensor,
}
