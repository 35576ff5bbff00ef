"""A model as one file that runs without its Python source: its program, and its weights.

The program is what `torch.export` records when it calls the model once with symbolic tensors (Dive
into Deep Learning, "Compilers and Interpreters", calls this hybrid programming): operations on
tensors are kept; `print` and other Python around them happens while it is recorded, never again.

The file is torch's own archive (`.pt2`). It is a program: load only what you would run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from evenstep.errors import BatchError, ExportError, SaveError
from evenstep.inference.onnx_export import as_onnx
from evenstep.shard.evaluation import evaluation_mode

Inputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"

_NOTE = "evenstep.json"  # beside torch's own entries in the archive
_FORMAT = "evenstep export"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Input:
    """What one input of an exported model must be.

    Attributes:
        dtype: of torch, without `torch.`.
        shape: after the first dimension, which is the batch and may be of any length.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Input:
        """Return what describes `tensor`."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(['batch', *map(str, self.shape)])})"


class Exported:
    """An exported model, in evaluation mode: called with tensors, it returns what the model would.

    Attributes:
        inputs: what it is called with.
    """

    def __init__(self, program: torch.export.ExportedProgram, inputs: tuple[Input, ...]) -> None:
        self.inputs = inputs
        self._module = program.module()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Return the outputs for a batch, without gradients.

        Raises:
            BatchError: the inputs are not as many, of the dtypes or shapes that they must be.
        """
        self._check(inputs)
        with torch.no_grad():
            return self._module(*inputs)

    def _check(self, inputs: tuple[torch.Tensor, ...]) -> None:
        needed = ", ".join(map(str, self.inputs))
        for tensor in inputs:
            if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
                raise BatchError(
                    f"got a {type(tensor).__name__} without a batch dimension: the exported model "
                    f"needs {needed}"
                )
        got = tuple(Input.like(tensor) for tensor in inputs)
        if got != self.inputs:
            raise BatchError(
                f"got {', '.join(map(str, got)) or 'nothing'}: the exported model needs {needed}"
            )
        lengths = {len(tensor) for tensor in inputs}
        if len(lengths) > 1 or 0 in lengths:
            raise BatchError(f"got inputs of {sorted(lengths)} examples: one number above 0 needed")


def export(net: nn.Module, example: Inputs, path: str | os.PathLike[str]) -> Path:
    """Write a model's program and weights, in evaluation mode, into one file.

    Args:
        net: the model; it is left as it was.
        example: what it is called with: a tensor, or a tuple of tensors, with the batch first. Its
            values don't matter; another batch size may be used later.
        path: the file: `.pt2` for `load_exported`, or `.onnx` for other programs (that needs
            `pip install evenstep[onnx]`; the file is run in onnxruntime before it is written).

    Returns:
        The file's path.

    Raises:
        ExportError: the model can't be recorded as one program, and why; or onnxruntime computes
            something else.
        SaveError: the file can't be written; one that was there before is whole.
    """
    path = Path(path)
    if path.suffix not in (".pt2", ".onnx"):
        raise ExportError(f"got the file {path}: give one that ends in .pt2 or .onnx")
    # Two rows at least: a batch of one would be taken for a constant.
    inputs = tuple(torch.cat([one, one]) if len(one) == 1 else one for one in as_inputs(example))
    if path.suffix == ".onnx":
        _write_whole(path, as_onnx(net, inputs))
        return path
    note = {"format": _FORMAT, "version": _VERSION}
    note["inputs"] = [dataclasses.asdict(Input.like(tensor)) for tensor in inputs]
    program = recorded(net, inputs)
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={_NOTE: json.dumps(note)})
    _write_whole(path, content.getvalue())
    return path


def load_exported(path: str | os.PathLike[str]) -> Exported:
    """Return a model that `export` has written; its Python source is not needed.

    Raises:
        ExportError: the file is missing, damaged, or was not written by `export`.
    """
    path = Path(path)
    try:
        inputs = _read_note(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(path)
    except FileNotFoundError as error:
        raise ExportError(f"{path} is not there: give a file that evenstep.export wrote") from error
    except Exception as error:
        raise ExportError(
            f"{path} is damaged, or not a file that evenstep.export wrote ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no more is known'}): export it again"
        ) from error
    return Exported(program, inputs)


def as_inputs(example: Inputs) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an example.

    Raises:
        ExportError: they have no batch dimension, or not the same.
    """
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(one, torch.Tensor) and one.ndim for one in inputs):
        kinds = ", ".join(type(one).__name__ for one in inputs) or "nothing"
        raise ExportError(
            f"got an example of {kinds}: a tensor, or a tuple of tensors, with a batch dimension "
            f"is needed"
        )
    if len({len(tensor) for tensor in inputs}) != 1 or not len(inputs[0]):
        raise ExportError(
            f"got an example whose inputs have {[len(tensor) for tensor in inputs]} rows: the same "
            f"number of them, at least one, is needed"
        )
    return inputs


def recorded(
    net: nn.Module, inputs: tuple[torch.Tensor, ...], *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """Return a model's program, in evaluation mode; `dynamic`: for any batch size.

    Raises:
        ExportError: it can't be recorded; why.
    """
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs) if dynamic else None
    try:
        with evaluation_mode(net), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(net, inputs, dynamic_shapes=shapes)
    except Exception as error:
        raise ExportError(
            f"{type(net).__name__} can't be exported: {_reason(error)}. A program has no Python "
            f"left in it: branches and loops may depend on shapes, not on values, and everything "
            f"must be computed by torch"
        ) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that takes the place of `path` at once, or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise SaveError(f"{path} can't be written ({error.strerror or error})") from error


def _read_note(path: Path) -> tuple[Input, ...]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(f"/{_NOTE}")]
        note = json.loads(archive.read(name))
    if note["format"] != _FORMAT or note["version"] != _VERSION:
        raise ValueError(f"{note['format']} {note['version']}")
    return tuple(Input(one["dtype"], tuple(one["shape"])) for one in note["inputs"])
