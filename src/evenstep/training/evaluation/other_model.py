"""Evaluates a different model of the same structure in place of the trainer's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from evenstep.errors import ModelError


class OtherValues:
    """Values of other modules, which a model has while they are evaluated in its place.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: Mapping[str, torch.Tensor] | None = None

    @contextlib.contextmanager
    def of(self, other: nn.Module | None) -> Iterator[None]:
        """Inside `with`, give the model the parameters and buffers of a different module.

        At the end it has its own values again, bit for bit.

        Args:
            other: a module of its structure, such as an average of the model's weights; None for
                the model itself.

        Raises:
            ModelError: `other` has other parameters or buffers.
        """
        if other is None:
            yield
            return
        own, theirs = _tensors_by_name(self._model), _tensors_by_name(other)
        _refuse_other_structure(own, theirs)
        with _having(theirs, own) as self._own:
            try:
                yield
            finally:
                self._own = None

    @contextlib.contextmanager
    def put_away(self) -> Iterator[None]:
        """Inside `with`, the model has its own values: a handler of a signal saves it."""
        if self._own is None:
            yield
            return
        with _having(self._own, _tensors_by_name(self._model)):
            yield


@contextlib.contextmanager
def _having(
    values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Inside `with`, write values into tensors; yield those that they had, and have at the end."""
    before = {name: tensor.clone() for name, tensor in targets.items()}
    try:
        _copy_all(values, targets)
        yield before
    finally:
        try:
            _copy_all(before, targets)
        except BaseException:  # maybe thrown into this thread, and has cut that off
            _copy_all(before, targets)
            raise


def _refuse_other_structure(
    own: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
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


def _tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _copy_all(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])
