"""Hashes of what torch's own kernels return for the operations that are claimed to be exact.

`python exact_operations.py` prints, as JSON, the hashes of each overload's cases: to be compared
between vectors of several widths (`ATEN_CPU_CAPABILITY`).
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from evenstep.arithmetic.exact import NAMES, is_exact
from exact_cases import CASES, OPTIONS, SCALARS, Case
from exact_floats import odd_values

SIZES = (0, 1, 7, 16, 33, 1000)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
CALLED_BY_KERNELS = [torch.ops.aten.div.Tensor_mode]
"""What kernels call of torch, in some cases, with the names that they have themselves."""
UNDEFINED = "empty resize new_empty"
"""Operations (by the start of their names) whose results have values that nobody set."""


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return odd values of a type; integers are between -36 and 36."""
    floats = odd_values(math.prod(shape), seed)
    if dtype is torch.float64:
        floats = floats.double() * odd_values(floats.numel(), seed + 1).double()
    elif not dtype.is_floating_point:
        floats = (floats.nan_to_num(0.0, 5.0, -5.0).clamp(-9, 9) * 4).round()
    return floats.to(dtype).reshape(shape)


def inputs(dtype: torch.dtype, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield tensors of several sizes and memory layouts."""
    for size in SIZES:
        yield values((size,), dtype, seed + size)
    for size in SIZES[2:]:  # equal numbers, zeros of both signs
        yield (torch.arange(size + seed) * 7919 % 13 - 7).clamp(-1, 0).mul(0.0).to(dtype)[:size]
        yield (torch.arange(size + seed) * 7919 % 13 - 7).clamp(-1, 1).to(dtype)[:size]
    matrix = values((9, 35), dtype, seed)
    yield from (matrix, matrix.t(), matrix[::2, 1::3], matrix[:, :1].expand(9, 40))
    images = values((2, 19, 5, 7), dtype, seed)
    yield from (images, images.contiguous(memory_format=torch.channels_last))


def overloads(name: str) -> Iterator[Any]:
    """Yield the overloads of an operation that an ordinary model may call; the in-place ones, too.

    Not those that have a kernel of their own, `out=` or named dimensions, nor those for single
    numbers (TorchScript's).
    """
    for packet in (name, f"{name}_"):
        found = getattr(torch.ops.aten, packet, None)
        for overload in found.overloads() if found else ():
            operation = getattr(found, overload)
            arguments = operation._schema.arguments
            kinds = {str(one.type) for one in arguments}
            if any(one.is_out for one in arguments) or "Dimname" in str(kinds):
                continue
            if any(one.name == "names" for one in arguments):
                continue
            if torch._C._dispatch_has_kernel(operation.name()) and is_exact(operation):
                yield operation
    yield from (one for one in CALLED_BY_KERNELS if one.name().startswith(f"aten::{name}."))


def case_of(operation: Any) -> Case:
    """Return the arguments for an operation: its own case, or what its schema suggests."""
    packet, _, overload = operation.name().removeprefix("aten::").partition(".")
    if packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]
    own = CASES.get(f"{packet}.{overload or 'default'}") or CASES.get(packet)
    return own or (lambda x, y: suggested(operation, x, y))


def suggested(operation: Any, x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
    """Return arguments from the types and names of those that have no default."""
    tensors = iter((x, y, x.flip(0)))
    choices: list[list[Any]] = []
    for one in operation._schema.arguments:
        kind = str(one.type)
        if one.has_default_value() or one.kwarg_only:
            continue
        if one.name in ("mask", "condition"):
            choices.append([y > 0])
        elif kind == "Tensor":
            choices.append([next(tensors)])
        elif kind == "List[Tensor]":
            choices.append([[x, y, x]])
        elif kind == "number":
            choices.append(list(SCALARS))
        elif one.name == "dim":
            choices.append([-1, 0])
        elif one.name in ("size", "output_size"):
            choices.append([list(x.shape)])
        else:
            raise AssertionError(f"{operation} needs a case: {one.name} of {kind}")
    most = max(map(len, choices), default=1)
    return [[choice[number % len(choice)] for choice in choices] for number in range(most)]


def hashes(operation: Any) -> Iterator[str]:
    """Yield the hash of each case of an operation; "" where the operation takes no such case."""
    case = case_of(operation)
    name = operation.name().removeprefix("aten::")
    options = OPTIONS.get(name.replace("_.", ".")) or [{}]
    if any(one.name == "generator" and one.kwarg_only for one in operation._schema.arguments):
        options = [{"generator": None}]
    shape_only = name.startswith(tuple(UNDEFINED.split()))
    for dtype in DTYPES:
        for x, y in zip(inputs(dtype), inputs(dtype, 77), strict=True):
            try:
                made = case(x, y)
            except (RuntimeError, IndexError, ZeroDivisionError):
                yield ""
                continue
            for args in made:
                for kwargs in options:
                    torch.manual_seed(2)
                    yield called(operation, args, kwargs, shape_only)


def called(operation: Any, args: list[Any], kwargs: dict[str, Any], shape_only: bool) -> str:
    """Return the hash of one call's result."""
    try:
        return f"{fingerprint(operation(*map(copied, args), **kwargs), shape_only):08x}"
    except (RuntimeError, IndexError):
        return ""


def copied(value: Any) -> Any:
    """Return a copy with the same strides, since some operations write in place."""
    if isinstance(value, list):
        return [copied(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous():
        return value.clone()
    span = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    memory = value.as_strided((span if value.numel() else 0,), (1,))
    return memory.clone().as_strided(value.shape, value.stride())


def fingerprint(result: Any, shape_only: bool = False) -> int:
    """Return a hash of the bits of tensors, and of other values; any NaN is like any other."""
    if isinstance(result, list | tuple):
        return zlib.crc32(repr([fingerprint(one, shape_only) for one in result]).encode())
    if not isinstance(result, torch.Tensor):
        return zlib.crc32(repr(result).encode())
    described = repr((tuple(result.shape), result.stride(), result.dtype)).encode()
    dense = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
    dense = dense.clone(memory_format=torch.contiguous_format)
    if shape_only or not dense.numel():
        return zlib.crc32(described)
    if dense.is_floating_point():
        dense[dense.isnan()] = math.nan
    return zlib.crc32(dense.reshape(-1).view(torch.uint8).numpy().tobytes() + described)


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:] or sorted(NAMES)
    found = {str(one): list(hashes(one)) for name in names for one in overloads(name)}
    sys.stdout.write(json.dumps(found))
