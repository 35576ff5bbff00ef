"""Notices what the user has changed in the module between two steps, and carries it to a copy."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import logging
import mmap
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree
import torch
from torch import nn

from evenstep.devices import Device
from evenstep.private_torch.tensors import version_of
from evenstep.replicas.computed_before import TORCHS_OWN, carried, has_graph
from evenstep.replicas.replica import same_bits, strided_parts

Contents: TypeAlias = "tuple[Any, ...]"

_LARGE = 1 << 16  # elements: larger tensors are compared by torch's version counter alone
_SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_FIXED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(weakref.ReferenceType, torch.Generator, mmap.mmap, memoryview),
    logging.Logger,  # a copy has the same one
)
_PLAIN = (list, tuple, dict)
_ATTRIBUTES = operator.attrgetter("__dict__")


class Attribute(NamedTuple):
    """An attribute of one of the model's modules that the user has set or deleted."""

    module: int
    key: str


class Difference(NamedTuple):
    """How a model differs from what it was when it was last looked at.

    Attributes:
        attributes: those that can be given to a copy one by one.
        needs_rebuild: whether more than these has changed, so that copies must be made again.
    """

    attributes: Sequence[Attribute] = ()
    needs_rebuild: bool = False


class ModuleWatch:
    """What the attributes of a model were when it was last looked at, to be compared with now.

    The watch keeps the attributes of every module and parameter, and the contents of every list,
    dict, set, array, tensor and plain object that is reached from them. Comparing is cheap, since
    nearly all are the same objects as before, and few parameters have attributes.

    Args:
        model: the user's module.
        keeps_results: whether shards are computed on this module itself. Then the results of a
            forward pass that it keeps (tensors with a `grad_fn`) are no change.
    """

    def __init__(self, model: nn.Module, *, keeps_results: bool) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._keeps_results = keeps_results
        self.look()

    def look(self) -> None:
        """Take the model as it is now."""
        modules = self._modules
        self._own = [dict(module.__dict__) for module in modules]
        known = {id(one) for module in modules for one in (module, *_internals(module))}
        known.update(map(id, self._parameters))
        of_parameters = [*filter(None, map(_ATTRIBUTES, self._parameters))]
        self._with_attributes = len(of_parameters)
        values = (value for own in self._own for value in own.values())
        self._holders = [*_holders(itertools.chain(of_parameters, values), known)]

    def difference(self) -> Difference | None:
        """Return how the model differs from when it was last looked at; None if it does not."""
        if self._with_attributes != sum(map(bool, map(_ATTRIBUTES, self._parameters))) or not all(
            _same(read(value), seen) for read, value, seen in self._holders
        ):
            return Difference(needs_rebuild=True)
        changed = [
            Attribute(number, key)
            for number, (module, own) in enumerate(zip(self._modules, self._own))  # noqa: B905
            if not _same_items(module.__dict__, own)
            for key in self._changed_keys(module.__dict__, own)
        ]
        if not changed:
            return None
        values = (self._modules[number].__dict__.get(key) for number, key in changed)
        torchs_own = any(key in TORCHS_OWN for _, key in changed)
        return Difference(changed, torchs_own or not all(map(_can_be_carried, values)))

    def names(self, difference: Difference) -> list[str]:
        """Return the names of the attributes that differ, such as "encoder.scale"."""
        paths = [path for path, _ in self._modules[0].named_modules()]
        return [
            f"{paths[number]}.{key}" if paths[number] else key
            for number, key in difference.attributes
        ]

    def has_functions(self, difference: Difference) -> bool:
        """Return whether an attribute that differs is a function of Python, which is not copied."""
        values: Any = [self._modules[one.module].__dict__.get(one.key) for one in difference[0]]
        leaves: list[object] = optree.tree_leaves(values)
        return any(isinstance(leaf, types.FunctionType) for leaf in leaves)

    def carry(self, attribute: Attribute, copied: nn.Module, device: Device) -> None:
        """Give a changed attribute to `copied`, the copy of its module on `device`."""
        mine = self._modules[attribute.module].__dict__
        if attribute.key in mine:
            copied.__dict__[attribute.key] = carried(mine[attribute.key], device)
        else:
            copied.__dict__.pop(attribute.key, None)

    def _changed_keys(self, now: Mapping[str, Any], seen: Mapping[str, Any]) -> Iterator[str]:
        for key in {**seen, **now}:
            if key not in now or key not in seen:
                is_same = False
            elif now[key] is seen[key]:
                is_same = True
            elif _is_result(now[key]):
                is_same = self._keeps_results
            else:
                is_same = key not in TORCHS_OWN and _same_value(now[key], seen[key])
            if not is_same:
                yield key


def _internals(module: nn.Module) -> Iterator[Any]:
    """Yield the containers in which torch keeps a module's parts."""
    return (value for key, value in module.__dict__.items() if key in TORCHS_OWN)


def _same_items(now: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
    """Return whether two dicts hold the same objects under the same keys, in the same order."""
    return (
        len(now) == len(seen)
        and all(map(operator.is_, now.values(), seen.values()))
        and [*now] == [*seen]
    )


# ---- what a module's attributes hold


class _Holder(NamedTuple):
    """An object that can change while the attribute that holds it stays."""

    read: Callable[[Any], Contents]
    holder: Any
    seen: Contents


def _holders(values: Iterable[Any], known: set[int]) -> Iterator[_Holder]:
    """Yield every object that is reached from `values` and can change, once."""
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, _SCALARS) or id(value) in known:
            continue
        known.add(id(value))
        read = _reader(value)
        if read is not _nothing:
            contents = read(value)
            if isinstance(value, torch.Tensor):
                contents = (*contents[:2], *(values.clone() for values in contents[2:]))
            else:
                stack.extend(contents)
            if type(value) is not tuple:
                yield _Holder(read, value, contents)


def _reader(value: Any) -> Callable[[Any], Contents]:
    """Return what reads the contents of an object."""
    if type(value) in _READERS:
        return _READERS[type(value)]
    if isinstance(value, (*_SCALARS, *_FIXED)):
        return _nothing
    if isinstance(value, torch.Tensor):
        return _read_tensor
    if isinstance(value, np.ndarray):
        return _read_kind_of_array
    return _read_memory if _shows_memory(value) else _read_object


def _shows_memory(value: Any) -> bool:
    """Return whether an object has the buffer protocol: a `bytearray`, values of ctypes."""
    try:
        memoryview(value).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True


def _nothing(value: Any) -> Contents:
    return ()


def _read_tensor(tensor: torch.Tensor) -> Contents:
    if has_graph(tensor) or tensor.is_inference():
        return ()
    if tensor.layout is not torch.strided:
        parts = strided_parts(tensor)
        small = (part for part in parts if part.numel() <= _LARGE)
        return version_of(tensor), tuple(part.data_ptr() for part in parts), *small
    place = version_of(tensor), tensor.data_ptr()
    return (*place, tensor.detach()) if tensor.numel() <= _LARGE else place


def _read_array(array: np.ndarray[Any, Any]) -> Contents:
    held = array.flat if array.dtype == object else (array.tobytes(),)
    return array.dtype.str, array.shape, *held


def _read_kind_of_array(array: np.ndarray[Any, Any]) -> Contents:
    """Return the contents of an array of a class of its own (masked, a matrix), and attributes."""
    if isinstance(array, np.memmap) and not array.flags.writeable:
        return _read_object(array)
    return *_read_object(array), *_read_array(np.asarray(array))


def _read_memory(value: Any) -> Contents:
    return *_read_object(value), bytes(value)


def _read_object(value: Any) -> Contents:
    """Return the attributes of an object, and its items if it is a container too."""
    own = own_attributes(value)
    return type(value), *own, *own.values(), *_items(value)


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **held}


def _slots_of(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{kind.__name__.lstrip('_')}"
    return [
        private + name if name.startswith("__") else name
        for name in names
        if not (name.startswith("__") and name.endswith("__"))
    ]


def _items(value: Any) -> Contents:
    if isinstance(value, dict):
        return *value, *value.values()
    if isinstance(value, list | tuple | collections.deque):
        return tuple(value)
    return (frozenset(value),) if isinstance(value, set | frozenset) else ()


_READERS: dict[type, Callable[[Any], Contents]] = {
    list: tuple,
    tuple: tuple,
    dict: lambda value: (*value, *value.values()),
    set: lambda value: (frozenset(value),),
    torch.Tensor: _read_tensor,
    np.ndarray: _read_array,
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    types.MethodType: lambda value: (value.__self__, value.__func__),
}


# ---- comparing


def _same(now: Contents, seen: Contents) -> bool:
    return len(now) == len(seen) and (
        all(map(operator.is_, now, seen)) or all(map(_same_value, now, seen))
    )


def _same_value(now: Any, seen: Any) -> bool:
    """Return whether two values are one object, equal plain values, or nestings of such."""
    if now is seen or _is_result(now):
        return True
    if type(now) is not type(seen):
        return False
    if isinstance(now, float | complex):
        return repr(now) == repr(seen)  # 0.0 is not -0.0, and NaN is NaN
    if isinstance(now, (*_SCALARS, set, frozenset)):
        return bool(now == seen)
    if isinstance(now, torch.Tensor):
        return not isinstance(now, nn.Parameter) and same_bits(now, seen)
    if isinstance(now, list | tuple):
        return _same(tuple(now), tuple(seen))
    if isinstance(now, dict):
        return _same((*now, *now.values()), (*seen, *seen.values()))
    return False


def _is_result(value: Any) -> bool:
    """Return whether a value is computed by a forward pass: tensors with a graph."""
    if type(value) in (list, tuple) and value:
        return all(map(_is_result, value))
    return isinstance(value, torch.Tensor) and has_graph(value)


def _can_be_carried(value: Any) -> bool:
    """Return whether a copy's attribute can be set to a copy of `value`, which nothing shares."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    if type(value) in _PLAIN:
        return all(map(_can_be_carried, _items(value)))
    return isinstance(value, (*_SCALARS, type, types.FunctionType, types.BuiltinFunctionType))
