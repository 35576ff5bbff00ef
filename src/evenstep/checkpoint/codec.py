"""A training state as plain JSON values and named tensors, and back: exactly, and without pickle.

A *tree* is any nesting of dicts, lists and tuples whose leaves are None, bool, int, float, complex,
str and tensors. `encode` turns it into one JSON value beside the tensors, `decode` turns it back.

    None, bool, str, int, finite float   as they are: Python writes digits that read back exactly
    list                                 a list
    dict whose keys are plain str        an object, in the order of the dict
    everything else                      an object of one key that starts with `$`, see `_DECODERS`

A dict with a key that starts with `$` becomes a `$dict` of pairs, so that no dict of the caller's
can be taken for a marker.

What is not kept: a tensor's device (it comes back on the CPU) and `requires_grad`; that two leaves
were one object or shared memory (each comes back in memory of its own); attributes set on a
container, such as the `_metadata` of a module's state dict.
"""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from evenstep.errors import CheckpointError

Tree: TypeAlias = Any
"""Dicts, lists and tuples of None, bool, int, float, complex, str and tensors, in any nesting."""

Plain: TypeAlias = Any
"""What `json.dumps(..., allow_nan=False)` takes: the encoded tree without its tensors."""

_Path: TypeAlias = tuple[Hashable, ...]
_Tensors: TypeAlias = dict[str, torch.Tensor]
_Fetch: TypeAlias = Callable[[str], torch.Tensor]

_MAX_DEPTH = 100  # far below Python's own recursion limit, and what a tree that holds itself hits
_MAX_NAME = 200  # characters: the header of a safetensors file is bounded
_RESERVED = "__metadata__"  # no tensor of a safetensors file may have this name

# What taking apart a value that `encode` did not write may raise.
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, RecursionError, struct.error)

# Every version of safetensors stores these. All other dtypes are stored as bytes (uint8).
_NATIVE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)


def encode(tree: Tree) -> tuple[Plain, dict[str, torch.Tensor]]:
    """Split `tree` into a plain JSON value and its tensors by name.

    OrderedDict and defaultdict are kept as dict, `torch.Size` as tuple, `Parameter` as tensor, and
    a numpy number or bool as the Python number that equals it.

    Returns:
        The plain value, and tensors on the CPU, contiguous, none sharing memory with another; they
        may share memory with the tree's own, so write them before the tree changes. Dtypes that
        safetensors may not know (complex, float8, ...) are flat uint8 tensors of their bytes.

    Raises:
        CheckpointError: a leaf, key or container of another kind, a tensor that is sparse,
            quantized, nested or without data, or a tree of more than 100 levels.
    """
    tensors: _Tensors = {}
    plain = _encode(tree, (), tensors)
    return plain, _unshare(tensors)


def decode(plain: Plain, fetch: Callable[[str], torch.Tensor]) -> Tree:
    """Return the tree that `encode` split into `plain` and the tensors that `fetch` finds by name.

    Every tensor comes back on the CPU in freshly allocated memory of its own, with the dtype, shape
    and strides it had; one that was not dense (expanded, or a slice with gaps) is contiguous.

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


def _encode(value: Any, path: _Path, tensors: _Tensors) -> Plain:
    kind = type(value)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](value, path, tensors)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _encode_tensor(value, path, tensors)
    if _is_numpy_number(value):
        return _encode(value.item(), path, tensors)
    raise _refusal(value, path)


def _encode_float(value: float) -> Plain:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> Plain:
    return value if _is_unicode(value) else {"$str": value.encode("utf-8", "surrogatepass").hex()}


def _encode_list(value: list[Any], path: _Path, tensors: _Tensors) -> Plain:
    return [_encode(item, _step(path, place), tensors) for place, item in enumerate(value)]


def _encode_tuple(value: tuple[Any, ...], path: _Path, tensors: _Tensors) -> Plain:
    return {"$tuple": _encode_list(list(value), path, tensors)}


def _encode_dict(value: dict[Any, Any], path: _Path, tensors: _Tensors) -> Plain:
    if all(type(key) is str and key[:1] != "$" and _is_unicode(key) for key in value):
        return {key: _encode(item, _step(path, key), tensors) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, path, tensors)}


def _encode_counter(value: dict[Any, Any], path: _Path, tensors: _Tensors) -> Plain:
    return {"$counter": _encode_pairs(value, path, tensors)}


def _encode_pairs(value: dict[Any, Any], path: _Path, tensors: _Tensors) -> list[Plain]:
    return [
        [_encode_key(key, path), _encode(item, _step(path, key), tensors)]
        for key, item in value.items()
    ]


def _encode_key(key: Any, path: _Path) -> Plain:
    if type(key) in (tuple, torch.Size):
        return {"$tuple": [_encode_key(part, _step(path, key)) for part in key]}
    if type(key) in _SCALARS or _is_numpy_number(key):
        return _encode(key, path, {})
    raise CheckpointError(
        f"{_spell(path)} has a key of type {_type_name(key)}, which a checkpoint can't hold: "
        f"use None, bool, int, float, complex, str or tuples of these"
    )


def _encode_tensor(tensor: torch.Tensor, path: _Path, tensors: _Tensors) -> Plain:
    _check_tensor(tensor, path)
    name = _free_name(path, tensors)
    tensors[name] = _storable(tensor)
    strides = tensor.stride()
    if not _is_dense(tensor.shape, strides):
        strides = torch.empty(tensor.shape, device="meta").stride()
    return {
        "$tensor": {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(strides),
        }
    }


def _check_tensor(tensor: torch.Tensor, path: _Path) -> None:
    obstacles = {
        f"a {tensor.layout} tensor": tensor.layout != torch.strided,
        "a nested tensor": tensor.is_nested,
        "a quantized tensor": tensor.is_quantized,
        "a tensor without data (device meta)": tensor.is_meta,
    }
    for obstacle, stands in obstacles.items():
        if stands:
            raise CheckpointError(
                f"{_spell(path)} is {obstacle}, which a checkpoint can't hold: "
                f"store a dense tensor, or leave it out"
            )


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.dtype in _NATIVE:
        return plain
    flat = plain.as_strided((plain.numel(),), (1,))  # a lone element may have any stride
    return flat.view(torch.uint8)


def _unshare(tensors: _Tensors) -> _Tensors:
    """Copy what shares its memory with an earlier tensor: safetensors refuses that."""
    seen: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return unshared


def _free_name(path: _Path, tensors: _Tensors) -> str:
    steps = (step if type(step) is str else repr(step) for step in path)
    name = "/".join(steps).encode("utf-8", "backslashreplace").decode()[:_MAX_NAME]
    taken = {_RESERVED, ""}
    while name in tensors or name in taken:
        name = f"{name}#{len(tensors)}"
    return name


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


def _decode_pairs(pairs: list[Any], fetch: _Fetch) -> dict[Any, Tree]:
    return {_decode(key, fetch): _decode(item, fetch) for key, item in pairs}


def _decode_tensor(entry: Plain, fetch: _Fetch) -> torch.Tensor:
    shape, strides = _sizes(entry["shape"]), _sizes(entry["strides"])
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype} is not a dtype")
    stored = _as_dtype(fetch(entry["name"]), dtype, shape)
    if (stored.dtype, tuple(stored.shape)) != (dtype, shape) or not _is_dense(shape, strides):
        raise ValueError(f"{entry} is stored as {stored.dtype} of shape {tuple(stored.shape)}")
    return torch.empty_strided(shape, strides, dtype=dtype).copy_(stored)


def _as_dtype(stored: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype in _NATIVE or stored.numel() != math.prod(shape) * dtype.itemsize:
        return stored
    return stored.clone().view(dtype).reshape(shape)  # the clone is aligned for every dtype


def _sizes(numbers: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are not sizes or strides")
    return tuple(numbers)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one block of memory without gap or overlap."""
    dimensions = sorted((stride, size) for size, stride in zip(shape, strides, strict=True))
    expected = 1
    for stride, size in dimensions:
        if size > 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def _is_numpy_number(value: object) -> bool:
    """Whether `value` is a numpy scalar that a Python number equals: a long double is not."""
    if isinstance(value, np.timedelta64) or not isinstance(value, np.bool_ | np.number):
        return False
    return type(value.item()) in (bool, int, float, complex)


def _is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogate, of which JSON would join two to one character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _step(path: _Path, key: Hashable) -> _Path:
    if len(path) >= _MAX_DEPTH:
        raise CheckpointError(
            f"{_spell(path[:3])}... nests more than {_MAX_DEPTH} levels deep, or holds itself: "
            f"make it flatter"
        )
    return (*path, key)


def _refusal(value: object, path: _Path) -> CheckpointError:
    return CheckpointError(
        f"{_spell(path)} is of type {_type_name(value)}, which a checkpoint can't hold: "
        f"give None, bool, int, float, complex, str, tensors, or lists, tuples and dicts of these, "
        f"or leave it out"
    )


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

_CONTAINERS: dict[type, Callable[[Any, _Path, _Tensors], Plain]] = {
    list: _encode_list,
    tuple: _encode_tuple,
    torch.Size: _encode_tuple,
    dict: _encode_dict,
    collections.OrderedDict: _encode_dict,
    collections.defaultdict: _encode_dict,
    collections.Counter: _encode_counter,
}

_DECODERS: dict[str, Callable[[Any, _Fetch], Tree]] = {
    "$int": lambda digits, fetch: int(digits, 16),
    "$float": _decode_float,  # 16 hexadecimal digits: the bits of the double, big-endian
    "$complex": _decode_complex,  # [real, imaginary]
    "$str": lambda digits, fetch: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    "$tuple": lambda items, fetch: tuple(_decode(items, fetch)),
    "$dict": _decode_pairs,  # [[key, value], ...]
    "$counter": lambda pairs, fetch: collections.Counter(_decode_pairs(pairs, fetch)),
    "$tensor": _decode_tensor,
}
