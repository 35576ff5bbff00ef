"""Exports a model as one file, program and weights, that runs without its Python source.

The program is recorded by `torch.export`, which calls the model once with symbolic tensors (hybrid
programming in Dive into Deep Learning, "Compilers and Interpreters"). Operations on tensors are
recorded; `print` and other Python code runs during the recording only.

The file is a torch archive (`.pt2`). The comment at its end, which torch skips, holds a SHA-256 of
everything before it. It contains a program: load only files that you trust.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from evenstep.errors import BatchError, ExportError, SaveError, hides_own_frames
from evenstep.files import read_file, write_file
from evenstep.inference.onnx_export import as_onnx
from evenstep.shard.evaluation import evaluation_mode

Inputs: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"

_NOTE = "evenstep.json"  # an entry in the archive besides torch's own
_FORMAT = "evenstep export"
_VERSION = 1

_END = b"PK\x05\x06"  # of a zip archive: 22 bytes, of which the last two are the comment's length
_SEAL = b"evenstep sha256 "
_DIGITS = 64


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


@hides_own_frames
def export(net: nn.Module, example: Inputs, path: str | os.PathLike[str]) -> Path:
    """Write a model's program and weights, in evaluation mode, to one file.

    Args:
        net: the model; it is not changed.
        example: an input of the model: a tensor or a tuple of tensors, with the batch as the first
            dimension. The values and the batch size do not matter.
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
    _write_whole(path, _sealed(content.getvalue()))
    return path


@hides_own_frames
def load_exported(path: str | os.PathLike[str], *, sha256: str | None = None) -> Exported:
    """Load a model that `export` has written, without its Python source.

    The file contains a SHA-256 of its content, which is checked before torch reads anything. That
    detects damage, but not an attack: anyone who can write the file can write a matching digest,
    and a program that runs with your permissions. To detect that too, give `sha256`, a digest that
    you got from someone you trust, and not together with the file.

    Args:
        path: the file.
        sha256: the SHA-256 of the whole file, 64 hexadecimal digits, as `evenstep export` and
            `sha256sum` print it; a file with a different digest is refused.

    Raises:
        ExportError: the file is missing or damaged, was not written by `export`, or does not have
            the digest `sha256`.
    """
    path = Path(path)
    try:
        content = _read_checked(path, sha256)
        inputs = _read_note(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(io.BytesIO(content))
    except ExportError:
        raise
    except FileNotFoundError as error:
        raise ExportError(
            f"{path} does not exist: give a file that evenstep.export wrote"
        ) from error
    except OSError as error:
        raise ExportError(
            f"{path} can't be read ({error.strerror or error}): give a file that evenstep.export "
            f"wrote"
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
        with (
            evaluation_mode(net),
            torch.no_grad(),
            warnings.catch_warnings(),
            _without_partial_program(),
        ):
            warnings.simplefilter("ignore")
            return torch.export.export(net, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ExportError(
            f"{type(net).__name__} can't be exported: {_reason(error)}. A program contains no "
            f"Python: branches and loops may depend on shapes, not on values, and everything must "
            f"be computed by torch"
        ) from error


@contextlib.contextmanager
def _without_partial_program() -> Iterator[None]:
    """Leave out of stderr what torch prints there of a program that it could not record.

    What the model itself writes to stderr appears after the recording.
    """
    written, program = io.StringIO(), ""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    if (
        logger.getEffectiveLevel() == logging.WARNING
    ):  # not where the user has chosen a different one
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(written):
            yield
    except Exception as error:
        if hasattr(error, "partial_fx_graph"):
            program = f"{error.partial_fx_graph}\n"
        raise
    finally:
        logger.setLevel(level)
        text = written.getvalue()
        sys.stderr.write(text.replace(program, "") if program else text)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    try:
        write_file(path, content)
    except OSError as error:
        raise SaveError(f"{path} can't be written ({error.strerror or error})") from error


def _sealed(archive: bytes) -> bytes:
    """Return a zip archive with a comment: the SHA-256 of all bytes before the digest."""
    assert archive[-22:-18] == _END
    assert archive[-2:] == bytes(2)
    body = archive[:-2] + (len(_SEAL) + _DIGITS).to_bytes(2, "little") + _SEAL
    return body + hashlib.sha256(body).hexdigest().encode()


def _read_checked(path: Path, sha256: str | None) -> bytes:
    """Return the bytes of a file, if its digest fits: that of the user, or else its own."""
    if sha256 is not None and not (isinstance(sha256, str) and _is_digest(sha256)):
        raise ExportError(f"got sha256={sha256!r}: give the 64 hexadecimal digits of a SHA-256")
    content = read_file(path)
    if sha256 is not None:
        found = hashlib.sha256(content).hexdigest()
        if found != sha256.lower():
            raise ExportError(
                f"{path} is not the file that was asked for: its SHA-256 is {found}, not {sha256}; "
                f"get the right file, or the digest of this one from someone you trust"
            )
    elif content[-22:-18] == _END:
        _read_note(content)
        raise ExportError(
            f"{path} contains no digest, as files of evenstep 0.1.0 don't, so damage would not be "
            f"noticed: export it again, or give load_exported sha256=..., the SHA-256 of the file"
        )
    else:
        body = memoryview(content)[:-_DIGITS]
        if hashlib.sha256(body).hexdigest().encode() != content[-_DIGITS:]:
            raise ValueError("its SHA-256 does not fit")
    return content


def _is_digest(text: str) -> bool:
    return re.fullmatch(f"[0-9a-fA-F]{{{_DIGITS}}}", text) is not None


def _read_note(content: bytes) -> tuple[Input, ...]:
    """Return the types of the inputs, from an archive that takes no more memory than its file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > len(content):
            raise ValueError(f"it unpacks to {unpacked} bytes, more than its {len(content)}")
        for name in archive.namelist():
            if name.startswith("/") or "\\" in name or ".." in name.split("/"):
                raise ValueError(f"the entry {name}")
        (name,) = [name for name in archive.namelist() if name.endswith(f"/{_NOTE}")]
        note = json.loads(archive.read(name))
    if note["format"] != _FORMAT or note["version"] != _VERSION:
        raise ValueError(f"{note['format']} {note['version']}")
    return tuple(_read_input(one) for one in note["inputs"])


def _read_input(one: dict[str, Any]) -> Input:
    dtype, shape = one["dtype"], one["shape"]
    if type(dtype) is not str or not all(type(size) is int for size in shape):
        raise ValueError(f"{dtype!r} {shape!r} of an input")
    return Input(dtype, tuple(shape))
