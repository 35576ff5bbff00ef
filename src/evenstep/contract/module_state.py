"""Saves, restores and compares the state of a module that a shard might change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import nn

from evenstep.replicas import Replica
from evenstep.replicas.replica import same_bits, sum_of_bits

_INTERNALS = frozenset(nn.Module().__dict__)
Attributes = Mapping[tuple[str, str], Any]
"""The plain attributes of every module, by the module's name and their own."""


@contextmanager
def kept(replica: Replica) -> Iterator[None]:
    """Inside `with`, a replica may compute shards; at the end it is as it was before.

    Plain attributes are bound to their earlier objects again. Parameters must not be written.
    """
    modules = [(module, dict(module.__dict__)) for module in replica.module.modules()]
    gradients = [parameter.grad for parameter in replica.parameters]
    try:
        yield
    finally:
        if replica.buffers:
            replica.put_back_buffers()
            replica.open_shard()
        for parameter, gradient in zip(replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, attributes in modules:
            _rebind(module.__dict__, attributes)


def parameter_marks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return numbers for each parameter by name, which change when it is written.

    The sum of its bits notices what the version counter does not, such as a write to
    `parameter.data`.
    """
    return {
        name: (parameter._version, parameter.data_ptr(), int(sum_of_bits(parameter)))
        for name, parameter in module.named_parameters()
    }


def attributes_of(module: nn.Module) -> Attributes:
    """Return the values of all plain attributes, with copies of tensors, lists and dicts."""
    return {
        (name, key): _copied(value)
        for name, child in module.named_modules()
        for key, value in child.__dict__.items()
        if key not in _INTERNALS
    }


def changed_attributes(before: Attributes, after: Attributes) -> list[str]:
    """Return the names of the attributes that differ, such as "encoder.hidden"."""
    return [
        f"{name}.{key}" if name else key
        for (name, key), value in after.items()
        if _differs(value, before.get((name, key)))
    ]


def _rebind(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key in [*attributes]:
        if key not in _INTERNALS and key not in before:
            del attributes[key]
    for key, value in before.items():
        if key not in _INTERNALS and attributes.get(key, _INTERNALS) is not value:
            attributes[key] = value


def _copied(value: Any) -> Any:
    return optree.tree_map(_copied_leaf, value, none_is_leaf=True)


def _copied_leaf(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _differs(ours: Any, theirs: Any) -> bool:
    """Return whether plain values, tensors, or nestings of them differ; other objects don't."""
    if ours is theirs:
        return False
    mine, structure = optree.tree_flatten(ours, none_is_leaf=True)
    its, other = optree.tree_flatten(theirs, none_is_leaf=True)
    if structure != other:
        return True
    return any(map(_leaf_differs, mine, its))


def _leaf_differs(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return True
    if isinstance(ours, torch.Tensor):
        return not same_bits(ours, theirs)
    return isinstance(ours, int | float | str | bytes) and ours != theirs
