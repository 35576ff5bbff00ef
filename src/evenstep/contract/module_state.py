"""Saves, restores and compares the state of a module that a shard might change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import optree
import torch
from torch import nn

from evenstep.devices.addresses import ALIGNMENT, PAGE, copy_in_page, is_alone, rounding
from evenstep.private_torch.modules import own_buffers
from evenstep.private_torch.tensors import version_of
from evenstep.replicas import Replica, StandIn
from evenstep.replicas.module_sync import own_attributes
from evenstep.replicas.replica import same_bits, sums_of_bits

_INTERNALS = frozenset(nn.Module().__dict__)
_ALIGNMENT_OF_A_GPU = 512  # bytes
Attributes = Mapping[tuple[str, str], Any]
"""The plain attributes of every module, by the module's name and their own."""
Path = tuple[Any, ...]
"""The name of a module, that of an attribute, and keys in the dicts, lists and objects in it."""


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


@contextmanager
def elsewhere(copied: Replica) -> Iterator[None]:
    """Inside `with`, the parameters and buffers of a copy lie at other multiples of 64 bytes.

    That is where products round alike. Modulo 4,096, all addresses are others than before. Buffers
    that share memory stay. The parameters of the copy must not be written there.
    """
    held = rounding((*copied.parameters, *filter(is_alone, copied.buffers)))
    before = [one.data for one in held]
    line = _ALIGNMENT_OF_A_GPU if copied.device.is_accelerator else ALIGNMENT  # bytes
    try:
        for number, one in enumerate(held):
            lines = 1 + 5 * number % (PAGE // line - 1)  # from where it was, never a whole page
            one.data = copy_in_page(one, one.data_ptr() + lines * line)
        yield
    finally:
        for one, data in zip(held, before, strict=True):
            one.data = data


def parameter_marks(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return numbers for each parameter by name, which change when it is written.

    The sum of its bits notices what the version counter does not, such as a write to
    `parameter.data`.
    """
    named = dict(module.named_parameters())
    sums = sums_of_bits([*named.values()])
    return {
        name: (version_of(parameter), parameter.data_ptr(), bits)
        for (name, parameter), bits in zip(named.items(), sums, strict=True)
    }


def attributes_of(module: nn.Module) -> Attributes:
    """Return the values of all plain attributes, with copies of what they hold.

    Of an object that is neither a module nor a function, its own attributes are taken.
    """
    return {
        (name, key): _copied(value)
        for name, child in module.named_modules()
        for key, value in child.__dict__.items()
        if key not in _INTERNALS
    }


def state_of(replica: Replica) -> Attributes:
    """Return the plain attributes of all modules, and buffers that shards have registered."""
    known = {*map(id, replica.buffers)}
    registered = {
        (name, key): buffer.detach().clone()
        for name, child in replica.module.named_modules()
        for key, buffer in own_buffers(child).items()
        if buffer is not None and id(buffer) not in known
    }
    return {**attributes_of(replica.module), **registered}


def changed_attributes(before: Attributes, after: Attributes) -> list[str]:
    """Return the names of the attributes that differ, such as "model.encoder.hidden"."""
    return [named(path) for path, value in after.items() if _differs(value, before.get(path))]


def _rebind(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key in [*attributes]:
        if key not in _INTERNALS and key not in before:
            del attributes[key]
    for key, value in before.items():
        if key not in _INTERNALS and attributes.get(key, _INTERNALS) is not value:
            attributes[key] = value


def differing_attributes(ours: Attributes, theirs: Attributes) -> list[str]:
    """Return the names of the attributes that differ in two copies of a module.

    Integers, and collections of different lengths, count as equal: they may count the shards that
    a copy has computed, or note something about each.
    """
    return [named(path) for path, one in ours.items() if _leaves_differ(one, theirs.get(path))]


def differing_counts(ours: Attributes, theirs: Attributes) -> list[Path]:
    """Return where the single integers are that differ in two copies of a module."""
    found: list[Path] = []
    for key, value in ours.items():
        _find_counts(key, value, theirs.get(key), found)
    return found


def named(path: Path) -> str:
    """Return a path with dots, such as "model.encoder.calls", for a message."""
    return ".".join(["model", *(str(step) for step in path if step != "")])


@contextmanager
def counts_set(module: nn.Module, paths: Sequence[Path], count: int) -> Iterator[None]:
    """Inside `with`, integers in attributes of a module have a different value."""
    before = []
    try:
        for path in paths:
            holder, key = _holder_of(module, path), path[-1]
            with suppress(LookupError, TypeError):  # a tuple, or a different list by now
                held = holder[key]
                is_tensor = isinstance(held, torch.Tensor)
                holder[key] = torch.full_like(held, count) if is_tensor else count
                before.append((holder, key, held))
        yield
    finally:
        for holder, key, held in before:
            holder[key] = held


def _holder_of(module: nn.Module, path: Path) -> Any:
    """Return the dict, list or tuple that holds what is at `path`; None if it is gone."""
    name, *keys, _ = path
    holder: Any = module.get_submodule(name).__dict__
    with suppress(LookupError, TypeError):
        for key in keys:
            held = holder[key]
            holder = held if isinstance(held, _HOLDERS) else vars(held)
        return holder
    return None


_HOLDERS = (dict, list, tuple)


def _find_counts(path: Path, ours: Any, theirs: Any, found: list[Path]) -> None:
    if type(ours) is type(theirs) and isinstance(ours, _HOLDERS) and len(ours) == len(theirs):
        items = ours.items() if isinstance(ours, dict) else enumerate(ours)
        for key, one in items:
            if not isinstance(ours, dict) or key in theirs:
                _find_counts((*path, key), one, theirs[key], found)
    elif _counts(ours) and _differs(ours, theirs) and getattr(ours, "ndim", 0) == 0:
        found.append(path)


_ATOMS = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Tensor)
_PLAIN = {bool, int, float, str, type(None)}
_DEPTH = 2  # of objects within objects


def _copied(value: Any, depth: int = _DEPTH) -> Any:
    if type(value) in _PLAIN:
        return value
    return optree.tree_map(lambda leaf: _copied_leaf(leaf, depth), value, none_is_leaf=True)


def _copied_leaf(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return repr(value) if type(value) is StandIn else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if depth and not isinstance(value, _ATOMS) and (own := own_attributes(value)):
        return {key: _copied(inner, depth - 1) for key, inner in own.items()}
    return value


def _differs(ours: Any, theirs: Any) -> bool:
    """Return whether plain values, tensors, or nestings of them differ; other objects don't."""
    if ours is theirs:
        return False
    mine, structure = optree.tree_flatten(ours, none_is_leaf=True)
    its, other = optree.tree_flatten(theirs, none_is_leaf=True)
    return structure != other or any(map(_leaf_differs, mine, its))


def _leaves_differ(ours: Any, theirs: Any) -> bool:
    mine = optree.tree_leaves(ours, none_is_leaf=True)
    its = optree.tree_leaves(theirs, none_is_leaf=True)
    pairs = zip(mine, its, strict=False)
    return len(mine) == len(its) and any(
        _leaf_differs(one, other) for one, other in pairs if not (_counts(one) and _counts(other))
    )


def _counts(value: Any) -> bool:
    """Return whether a value may be a number of shards."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
    return isinstance(value, int) and not isinstance(value, bool)


def _leaf_differs(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return True
    if isinstance(ours, torch.Tensor):
        return not same_bits(ours, theirs)
    if isinstance(ours, np.ndarray):
        return bool(ours.dtype != object) and ours.tobytes() != theirs.tobytes()
    return isinstance(ours, int | float | complex | str | bytes) and repr(ours) != repr(theirs)
