"""Turns the layers of a model into layers that are computed slice by slice."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from evenstep.errors import ModelError, shown
from evenstep.nn.layers import Sliced, SlicedConv2d, SlicedEmbedding, SlicedLinear
from evenstep.nn.products import Along

M = TypeVar("M", bound=nn.Module)

_SLICED_KINDS: dict[type[nn.Module], Any] = {
    nn.Linear: SlicedLinear,
    nn.Conv2d: SlicedConv2d,
    nn.Embedding: SlicedEmbedding,
    **{kind: kind for kind in (SlicedLinear, SlicedConv2d, SlicedEmbedding)},
}


def slice_(
    model: M, slices: int, *, along: Along = "outputs", layers: Iterable[str] | None = None
) -> M:
    """Have layers of a model computed as S slices, in place.

        evenstep.nn.slice_(model, slices=4)  # all Linear, Conv2d and Embedding layers
        evenstep.nn.slice_(model, slices=2, along="inputs", layers=["*.fc2"])

    The layers stay the same objects, with the same parameters, names, hooks and state dict; their
    classes become `SlicedLinear`, `SlicedConv2d` and `SlicedEmbedding`. S belongs to the
    experiment: a different S rounds differently. The devices have no effect on the result. A module
    that reads the weights of its children itself (`nn.MultiheadAttention`, and
    `nn.TransformerEncoderLayer` in evaluation) computes with them as they are, unsliced. Subclasses
    of torch's layers, such as parametrized ones, are left as they are.

    Args:
        model: any module.
        slices: S, the number of slices of each layer.
        along: "outputs": slices compute different outputs; "inputs": each slice computes a partial
            result from some of the inputs, and these are summed in the canonical tree.
        layers: names of layers in the model, or patterns such as "encoder.*"; None for all.

    Returns:
        The model.

    Raises:
        ModelError: a layer can't be cut so, or there is none; the model was not changed.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"got {shown(model)} to be sliced: give a torch.nn.Module")
    chosen = _choose(model, layers)
    found = [(name, layer) for name, layer in chosen if type(layer) in _SLICED_KINDS]
    if not found:
        raise ModelError(
            "no layer to slice: the model, or what layers= names, has no Linear, Conv2d or "
            "Embedding of torch.nn"
        )
    before = [(layer, type(layer), dict(vars(layer))) for _, layer in found]
    try:
        for name, layer in found:
            layer.__class__ = _SLICED_KINDS[type(layer)]
            layer.cut(slices, along, name)  # type: ignore[operator]
    except ModelError:
        for layer, kind, own in before:
            layer.__class__ = kind
            vars(layer).clear()
            vars(layer).update(own)
        raise
    return model


def sliced_layers(model: nn.Module) -> dict[str, str]:
    """Return how each layer of a model is cut into more than one slice: "4 slices (outputs)"."""
    return {
        name: f"{layer.slices} slices ({layer.along})"
        for name, layer in model.named_modules()
        if isinstance(layer, Sliced) and layer.slices > 1
    }


def _choose(model: nn.Module, layers: Iterable[str] | None) -> Sequence[tuple[str, nn.Module]]:
    """Return the layers of a model that the patterns name."""
    named = list(model.named_modules())
    if layers is None:
        return named
    patterns = [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in named):
            raise ModelError(
                f"layers names {shown(pattern)}, which is no layer of the model: give names of "
                f"model.named_modules()"
            )
    return [
        (name, one)
        for name, one in named
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
