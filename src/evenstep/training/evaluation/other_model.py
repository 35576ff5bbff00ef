"""Evaluates another model of the same structure in place of the trainer's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from evenstep.errors import ModelError


@contextlib.contextmanager
def values_of(other: nn.Module | None, model: nn.Module) -> Iterator[None]:
    """Inside `with`, give `model` the parameters and buffers of another module of its structure.

    Args:
        other: the module, such as an average of the model's weights; None for the model itself.
        model: the user's model; at the end it has its own values again, bit for bit.

    Raises:
        ModelError: `other` has other parameters or buffers.
    """
    if other is None:
        yield
        return
    own, theirs = _tensors_by_name(model), _tensors_by_name(other)
    for name in {**own, **theirs}:
        shapes = [
            f"shape {tuple(each[name].shape)}" if name in each else "no tensor"
            for each in (own, theirs)
        ]
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"the given model has {shapes[1]} named {name}, the trainer's model {shapes[0]}: "
                f"give a module of the same structure (of an AveragedModel, its .module)"
            )
    before = {name: tensor.clone() for name, tensor in own.items()}
    try:
        _copy_all(theirs, own)
        yield
    finally:
        _copy_all(before, own)


def _tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _copy_all(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])
