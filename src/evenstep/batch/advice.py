"""What in a batch has caused an error of torch's, as advice in terms of the user's own tensors."""

from __future__ import annotations

import contextlib
import re

import torch
from torch import nn

from evenstep.batch.cut import Batch, Cut, dim_of, name_of
from evenstep.errors import EvenstepError

_DTYPES = re.compile(r"Input type \(|have the same dtype|expected scalar type")
_CHANNELS = re.compile(r"expected input\[[^]]*\] to have \d+ channels|\(batched\) input to conv2d")
_SIZES = re.compile(r"weight tensor should be|must match the|broadcast shape|out of bounds")
_CONV2D = "a Conv2d takes (examples, channels, height, width), so give X."


def advice_on(error: BaseException, cut: Cut, shard: int, model: nn.Module) -> str | None:
    """Return what in the batch has caused an error inside a shard, and what to write instead.

    Returns:
        A sentence; None for an error of a different kind, or of evenstep's own.
    """
    if isinstance(error, EvenstepError):
        return None
    if is_too_few_values(error):
        return _on_few_values(cut, shard)
    if not isinstance(error, RuntimeError | TypeError | AttributeError | IndexError):
        return None
    with contextlib.suppress(Exception):  # the error is what matters
        batch = cut.structure.unflatten(cut.views[shard])
        if isinstance(batch, tuple) and batch:
            return (
                _on_one_argument(error, batch)
                or _on_input(error, batch, cut, model)
                or _on_cut_tensors(error, cut, shard)
            )
    return None


def whole_in_one(batch: Batch) -> str | None:
    """Return what to write if a step was given a whole batch as its only argument."""
    if len(batch) == 1 and type(batch[0]) in (list, tuple) and len(batch[0]) > 1:
        kind, parts = type(batch[0]).__name__, len(batch[0])
        return f"got one argument, a {kind} of {parts} parts: write trainer.step(*batch)"
    return None


def is_too_few_values(error: BaseException) -> bool:
    """Return whether torch's BatchNorm has refused an input with one value a channel."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def _on_few_values(cut: Cut, shard: int) -> str:
    """Return advice on a shard that gives BatchNorm one value a channel."""
    if cut.part.own_shards is not None:
        return (
            f"micro-batch {shard} of evenstep.Shards has one value a channel, too few for "
            f"BatchNorm: join it with another one, or leave it out"
        )
    return (
        "BatchNorm needs more than one value a channel in each shard: use fewer shards or a larger "
        "batch"
    )


def _on_one_argument(error: BaseException, batch: Batch) -> str | None:
    """Return what to write if the model got a list instead of a tensor."""
    is_of_kind = isinstance(error, TypeError | AttributeError)
    is_named = re.search(r"\b(list|tuple)\b", str(error)) is not None
    return whole_in_one(batch) if is_of_kind and is_named else None


def _on_input(error: BaseException, batch: Batch, cut: Cut, model: nn.Module) -> str | None:
    first = batch[0]
    if not isinstance(error, RuntimeError) or not isinstance(first, torch.Tensor):
        return None
    if _DTYPES.search(str(error)):
        return _on_order(batch) or _on_dtype(first, model)
    if _CHANNELS.search(str(error)):
        return _on_channels(first, cut, model)
    return None


def _on_cut_tensors(error: BaseException, cut: Cut, shard: int) -> str | None:
    """Return advice on tensors that may be meant for every shard, such as weights of classes."""
    lo, hi = cut.bounds[shard]
    if cut.part.own_shards is not None or not _SIZES.search(str(error)):
        return None
    if not re.search(rf"\b{hi - lo}\b", str(error)):
        return None
    names = [
        name_of(path)
        for number, (path, view) in enumerate(
            zip(cut.structure.paths(), cut.views[shard], strict=True)
        )
        if number not in cut.shared and path != (0,) and view.ndim == 1 and view.is_floating_point()
    ]
    if not names:
        return None
    return (
        f"a shard has its own {hi - lo} of the {cut.part.examples} rows of {' and '.join(names)}: "
        f"if every shard needs all of them (weights of classes), give evenstep.shared(tensor)"
    )


def _on_order(batch: Batch) -> str | None:
    """Return advice on labels that were given before the input."""
    first, second = (*batch, None)[:2]
    if not isinstance(second, torch.Tensor) or not second.is_floating_point():
        return None
    if first.is_floating_point() or first.dtype is torch.uint8 or first.ndim >= second.ndim:
        return None
    return (
        f"batch[0] is {first.dtype} and batch[1] is {second.dtype}: the model's input comes first, "
        f"as in trainer.step(X, y)"
    )


def _on_dtype(first: torch.Tensor, model: nn.Module) -> str | None:
    """Return advice on an input of a different dtype than the parameters'."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    if len(dtypes) != 1 or first.dtype in dtypes:
        return None
    (dtype,) = dtypes
    if first.dtype is not torch.uint8 and not first.is_floating_point():
        return None
    cast = "X.float()" if dtype is torch.float32 else f"X.to({dtype})"
    scaled = f"{cast} / 255" if first.dtype is torch.uint8 else cast
    return f"batch[0] is {first.dtype}, but the model's parameters are {dtype}: give {scaled}"


def _on_channels(first: torch.Tensor, cut: Cut, model: nn.Module) -> str | None:
    """Return advice on images without a dimension for channels, or with the channels last."""
    convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d)]
    if not convolutions:
        return None
    shape, dim = [*first.shape], dim_of(first, cut.part.dim)
    if cut.part.own_shards is None:
        shape[dim] = cut.part.examples
    channels = convolutions[0].in_channels
    if len(shape) == 3 and channels == 1:
        found, fix = "without a dimension for channels", "unsqueeze(1)"
    elif len(shape) == 4 and shape[-1] == channels:
        found, fix = "with the channels last", "permute(0, 3, 1, 2)"
    else:
        return None
    return f"batch[0] is of shape {tuple(shape)}, {found}: {_CONV2D}{fix}"
