"""Explains why a loss or a metric does not fit the model's output, the targets, or their number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from evenstep.errors import ModelError, was_entered

_BROADCASTING = nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss
_BROADCASTING_FUNCTIONS = F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss
_BINARY = nn.BCELoss, nn.BCEWithLogitsLoss
_BINARY_FUNCTIONS = F.binary_cross_entropy, F.binary_cross_entropy_with_logits


def call_with(
    how: Callable[[], str], function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Return what a function of the user's returns.

    Raises:
        ModelError: it does not take these arguments; `how()` says what was called, and how.
    """
    try:
        return function(*arguments, **named)
    except TypeError as error:
        code = getattr(function, "__code__", None)
        if code is None or was_entered(code, error):
            raise
        raise ModelError(f"called {how()}: {error}") from None


def refuse_unfit_output(loss: object, output: object, targets: Sequence[Any]) -> None:
    """Refuse an output that is no tensor, and one that would be compared with all targets.

    Args:
        loss: only losses of torch's are judged.
        output: what the model has returned for a shard.
        targets: the shard's targets.

    Raises:
        ModelError: the message says what to write.
    """
    name = _name_of(loss)
    if name is None:
        return
    if not isinstance(output, torch.Tensor):
        part = '["name"]' if isinstance(output, Mapping) else "[0]"
        raise ModelError(
            f"the model returned a {type(output).__name__}, but {name} takes a tensor: give "
            f"objective=lambda model, X, y: loss(model(X){part}, y) instead of loss=..., or let "
            f"forward return the tensor alone"
        )
    if _is_one_of(loss, _BROADCASTING, _BROADCASTING_FUNCTIONS) and _are_tensors(targets):
        shapes = output.shape, targets[0].shape
        try:
            common = torch.broadcast_shapes(*shapes)
        except RuntimeError:  # torch says so too
            return
        if common not in shapes:
            raise ModelError(
                f"{_shapes(output, targets[0])}, so {name} would compare every example with all "
                f"others: {_reshaped(output, targets[0])}"
            )


def refuse_weights_of_examples(loss: Any, output: object, examples: int) -> None:
    """Refuse a loss of torch's that holds a weight for each example: shards have others.

    Args:
        loss: a module or function of torch's, or `functools.partial` of a function.
        output: what the model has returned for a shard.
        examples: the number of examples in the shard.

    Raises:
        ModelError: the message says where the weights belong.
    """
    if isinstance(loss, functools.partial):
        held, function = loss.keywords, loss.func
    else:
        held, function = {**vars(loss).get("_buffers", {})}, loss
    is_elementwise = _is_one_of(
        function, (*_BINARY, *_BROADCASTING), (*_BINARY_FUNCTIONS, *_BROADCASTING_FUNCTIONS)
    )
    if not is_elementwise or not isinstance(output, torch.Tensor) or not output.ndim:
        return
    for name in ("weight", "pos_weight"):
        weight = held.get(name)
        if not isinstance(weight, torch.Tensor) or weight.ndim != output.ndim:
            continue
        if len(weight) > 1 and not len(output) % examples:
            raise ModelError(
                f"the loss {_name_of(function)} holds a {name} of shape {tuple(weight.shape)}, one "
                f"for each example, but a shard has examples of its own: give the weights in the "
                f"batch, and objective=lambda model, X, y, w: (total, count), such as "
                f'F.binary_cross_entropy_with_logits(model(X), y, w, reduction="sum"), y.numel()'
            )


def advice_on_targets(loss: object, output: torch.Tensor, targets: Sequence[Any]) -> str | None:
    """Return what is wrong with the targets of a binary cross entropy; None if it is not known."""
    if not _is_one_of(loss, _BINARY, _BINARY_FUNCTIONS) or not _are_tensors(targets):
        return None
    (target,) = targets
    if target.shape != output.shape:
        return f"{_shapes(output, target)}: {_reshaped(output, target)}"
    if not target.is_floating_point():
        return f"the labels are {target.dtype}: {_name_of(loss)} takes floats, so give y.float()"
    return None


def advice_on_order(loss: Any, output: torch.Tensor, targets: Sequence[Any]) -> str | None:
    """Return what to write if a loss that has failed wants (target, output); None if it doesn't."""
    if not _are_tensors(targets):
        return None
    with torch.no_grad():
        value = loss(targets[0], output.detach())
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return None
    return (
        "the loss is called as loss(output, target), and works with (target, output) only: give "
        "lambda output, target: loss(target, output)"
    )


def _are_tensors(targets: Sequence[Any]) -> bool:
    return len(targets) == 1 and isinstance(targets[0], torch.Tensor)


def _shapes(output: torch.Tensor, target: torch.Tensor) -> str:
    """Return the shapes of a whole batch: those of a shard, with its examples by name."""
    rows = "examples" if output.shape[:1] == target.shape[:1] else None
    return f"the labels are of shape {_shape(target, rows)}, but the model gives " + _shape(
        output, rows
    )


def _shape(tensor: torch.Tensor, rows: str | None) -> str:
    sizes = [*map(str, tensor.shape)]
    sizes[:1] = [rows] if rows is not None else sizes[:1]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def _reshaped(output: torch.Tensor, target: torch.Tensor) -> str:
    if output.ndim == target.ndim + 1 and output.shape[-1] == 1:
        return "give y.unsqueeze(-1)"
    if target.ndim == output.ndim + 1 and target.shape[-1] == 1:
        return "give y.squeeze(-1)"
    return "give labels of the shape of the output"


def _is_one_of(loss: object, kinds: tuple[type, ...], functions: tuple[object, ...]) -> bool:
    return isinstance(loss, kinds) or any(loss is function for function in functions)


def _name_of(loss: object) -> str | None:
    """Return the name of a loss of torch's; None for another."""
    if type(loss).__module__ == nn.MSELoss.__module__:
        return type(loss).__name__
    is_function = getattr(loss, "__module__", None) == F.__name__ and hasattr(loss, "__name__")
    return f"F.{loss.__name__}" if is_function else None  # type: ignore[attr-defined]
