"""Saves arrays to a file and loads them, in the format of safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from evenstep.errors import MXNetError, SaveError
from evenstep.files import read_file, write_file
from evenstep.mxnet.core.array import NDArray, adopt
from evenstep.mxnet.core.context import Context, cpu

_LISTED = "list:"  # begins the names of arrays that were saved as a list


def save(fname: str | os.PathLike[str], data: Any) -> None:
    """Save an array, a list of arrays, or a dict from names to arrays. Waits for them.

    Raises:
        SaveError: the file can't be written; an existing one is left unchanged.
    """
    if isinstance(data, NDArray):
        data = [data]
    if not isinstance(data, Mapping):
        data = {f"{_LISTED}{number}": one for number, one in enumerate(data)}
    write(Path(fname), data)


def write(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write arrays by name."""
    tensors = {}
    for name, array in arrays.items():
        array.wait_to_read()
        tensors[name] = array.value().detach().cpu().contiguous().clone()
    try:
        write_file(path, safetensors.torch.save(tensors))
    except OSError as error:
        raise SaveError(f"{path} can't be written ({error.strerror or error})") from error


def read(path: str | os.PathLike[str], like: type[NDArray] = NDArray) -> dict[str, Any]:
    """Read arrays by name, into cpu(0).

    Raises:
        MXNetError: the file is missing, damaged, or was not written by `save`.
    """
    try:
        found = safetensors.torch.load(read_file(Path(path)))
    except (OSError, safetensors.SafetensorError) as error:
        raise MXNetError(
            f"{path} can't be read ({error}): give a file that evenstep.mxnet saved; files of "
            f"MXNet itself have a different format"
        ) from error
    return {name: adopt(tensor, cpu(), like) for name, tensor in found.items()}


def load(fname: str | os.PathLike[str], ctx: Context | None = None) -> Any:
    """Load what `save` has saved: a list of arrays, or a dict."""
    found = read(fname)
    if not all(name.startswith(_LISTED) for name in found):
        return found
    count: Sequence[int] = range(len(found))
    return [found[f"{_LISTED}{number}"] for number in count]
