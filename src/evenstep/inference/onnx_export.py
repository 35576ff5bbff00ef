"""Exports a model as ONNX, for programs without torch, and checks it with onnxruntime."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import warnings
from typing import Any

import optree
import torch
from torch import nn

from evenstep.errors import ExportError
from evenstep.shard.evaluation import evaluation_mode

_BOUND = 1e-4  # the largest difference of outputs, relative to the largest output
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def as_onnx(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> bytes:
    """Return the content of an ONNX file: a model in evaluation mode, for any batch size.

    The inputs have at least two rows. The model is not changed.

    Raises:
        ExportError: a package is missing, the model can't be written as ONNX, or onnxruntime
            computes other outputs than the model.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"{', '.join(missing)} is missing: pip install 'evenstep[onnx]'")
    try:
        content = _written(net, inputs)
        found = _run(content, inputs)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ExportError(f"{type(net).__name__} can't be written as ONNX: {reason}") from error
    with evaluation_mode(net), torch.no_grad():
        expected = optree.tree_leaves(net(*inputs))
    for mine, its in zip(expected, found, strict=True):
        difference = (mine.cpu() - its).abs().max().item()
        if not difference <= _BOUND * max(1.0, mine.abs().max().item()):
            raise ExportError(
                f"onnxruntime's outputs differ from those of {type(net).__name__} by "
                f"{difference:.1e}: nothing was written"
            )
    return content


def _written(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> bytes:
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    quiet = io.StringIO()
    with (
        evaluation_mode(net),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
    ):
        warnings.simplefilter("ignore")
        # Given the model, torch 2.6 would write the branch that the example takes.
        recorded = torch.export.export(net, inputs, dynamic_shapes=shapes, strict=False)
        program: Any = torch.onnx.export(recorded, dynamo=True, verbose=False)
    written: bytes = program.model_proto.SerializeToString()
    return written


def _run(content: bytes, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the outputs that onnxruntime computes."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    given = {name: tensor.cpu().numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, given)]
