"""Exports a model as one file, program and weights, that runs without its Python source.

The program is recorded by `torch.export`, which calls the model once with symbolic tensors (hybrid
programming in Dive into Deep Learning, "Compilers and Interpreters"). Operations on tensors are
recorded; `print` and other Python code runs during the recording only.

The file is a torch archive (`.pt2`). It contains a program: load only files that you trust.
"""

from __future__ import annotations

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
from evenstep.files import write_file
from evenstep.inference.onnx_export import as_onnx
from evenstep.shard.evaluation import evaluation_mode

Inputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"

_NOTE = "evenstep.json"  # an entry in the archive besides torch's own
_FORMAT = "evenstep export"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Input:
    """The type of one input of an exported model.

    Attributes:
        dtype: torch's name of the dtype, without `torch.`.
        shape: the shape without the first dimension, which is the batch and has any length.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Input:
        """Return the type of `tensor`."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(['batch', *map(str, self.shape)])})"


class Exported:
    """An exported model in evaluation mode; call it as you would call the model.

    Attributes:
        inputs: the types of its inputs.
    """

    def __init__(self, program: torch.export.ExportedProgram, inputs: tuple[Input, ...]) -> None:
        self.inputs = inputs
        self._module = program.module()

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Return the outputs for a batch, without gradients.

        Raises:
            BatchError: the inputs differ from `inputs` in number, dtypes or shapes.
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
            raise BatchError(
                f"got inputs of {sorted(lengths)} examples: give each the same number, at least 1"
            )


def export(net: nn.Module, example: Inputs, path: str | os.PathLike[str]) -> Path:
    """Write a model's program and weights, in evaluation mode, to one file.

    Args:
        net: the model; it is not changed.
        example: its input: a tensor or a tuple of tensors, with the batch as first dimension. The
            values and the batch size do not matter.
        path: the file: `.pt2` for `load_exported`, or `.onnx` for other programs. ONNX requires
            `pip install evenstep[onnx]`; the model is run by onnxruntime before it is written.

    Returns:
        The file's path.

    Raises:
        ExportError: the model can't be recorded as one program (the message says why), or
            onnxruntime computes other outputs.
        SaveError: the file can't be written; an existing file is left unchanged.
    """
    path = Path(path)
    if path.suffix not in (".pt2", ".onnx"):
        raise ExportError(f"got the file {path}: give one that ends in .pt2 or .onnx")
    # At least two rows: torch.export treats a batch size of 1 as a constant.
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
    """Load a model that `export` has written, without its Python source.

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
        raise ExportError(
            f"{path} does not exist: give a file that evenstep.export wrote"
        ) from error
    except Exception as error:
        raise ExportError(
            f"{path} is damaged, or not a file that evenstep.export wrote ({_reason(error)}): "
            f"export it again"
        ) from error
    return Exported(program, inputs)


def as_inputs(example: Inputs) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an example.

    Raises:
        ExportError: they have no batch dimension, or batches of different sizes.
    """
    inputs = example if isinstance(example, tuple) else (example,)
    if not inputs or not all(isinstance(one, torch.Tensor) and one.ndim for one in inputs):
        kinds = ", ".join(type(one).__name__ for one in inputs) or "nothing"
        raise ExportError(
            f"got an example of {kinds}: give a tensor, or a tuple of tensors, with a batch "
            f"dimension"
        )
    if len({len(tensor) for tensor in inputs}) != 1 or not len(inputs[0]):
        raise ExportError(
            f"got an example whose inputs have {[len(tensor) for tensor in inputs]} rows: give "
            f"each the same number, at least 1"
        )
    return inputs


def recorded(
    net: nn.Module, inputs: tuple[torch.Tensor, ...], *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """Record a model's program in evaluation mode; for any batch size if `dynamic`.

    Raises:
        ExportError: it can't be recorded; the message says why.
    """
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs) if dynamic else None
    try:
        with evaluation_mode(net), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(net, inputs, dynamic_shapes=shapes)
    except Exception as error:
        raise ExportError(
            f"{type(net).__name__} can't be exported: {_reason(error)}. A program contains no "
            f"Python: branches and loops may depend on shapes, not on values, and everything must "
            f"be computed by torch"
        ) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    try:
        write_file(path, content)
    except OSError as error:
        raise SaveError(f"{path} can't be written ({error.strerror or error})") from error


def _read_note(path: Path) -> tuple[Input, ...]:
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(f"/{_NOTE}")]
        note = json.loads(archive.read(name))
    if note["format"] != _FORMAT or note["version"] != _VERSION:
        raise ValueError(f"{note['format']} {note['version']}")
    return tuple(Input(one["dtype"], tuple(one["shape"])) for one in note["inputs"])
