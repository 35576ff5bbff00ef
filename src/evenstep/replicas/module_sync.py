"""Notices what the user has changed in the module between two steps, and carries it to a copy."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree
import torch
from torch import nn

from evenstep.devices import Device, carry
from evenstep.errors import ContractError
from evenstep.replicas.replica import same_bits, strided_parts

Contents: TypeAlias = "tuple[Any, ...]"

_LARGE = 1 << 16  # elements: larger tensors are compared by torch's version counter alone
_SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_FIXED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(weakref.ReferenceType, torch.Generator, nn.Parameter),
)
_PLAIN = (list, tuple, dict)


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

    The watch keeps the attributes of every module, and the contents of every list, dict, set,
    array, tensor and plain object that is reached from them. Comparing is cheap, since nearly all
    are the same objects as before.

    Args:
        model: the user's module.
        keeps_results: whether shards are computed on this module itself. Then the results of a
            forward pass that it keeps (tensors with a `grad_fn`) are no change.
    """

    def __init__(self, model: nn.Module, *, keeps_results: bool) -> None:
        self._modules = list(model.modules())
        self._keeps_results = keeps_results
        self.look()

    def look(self) -> None:
        """Take the model as it is now."""
        modules = self._modules
        self._own = [dict(module.__dict__) for module in modules]
        known = {id(one) for module in modules for one in (module, *_internals(module))}
        self._holders = [*_holders((value for own in self._own for value in own.values()), known)]

    def difference(self) -> Difference | None:
        """Return how the model differs from when it was last looked at; None if it does not."""
        if not all(_same(read(value), seen) for read, value, seen in self._holders):
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
        torchs_own = any(key in _TORCHS_OWN for _, key in changed)
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
            copied.__dict__[attribute.key] = _carried(mine[attribute.key], device)
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
                is_same = key not in _TORCHS_OWN and _same_value(now[key], seen[key])
            if not is_same:
                yield key


_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}


def _internals(module: nn.Module) -> Iterator[Any]:
    """Yield the containers in which torch keeps a module's parts."""
    return (value for key, value in module.__dict__.items() if key in _TORCHS_OWN)


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
    return _read_tensor if isinstance(value, torch.Tensor) else _read_object


def _nothing(value: Any) -> Contents:
    return ()


def _read_tensor(tensor: torch.Tensor) -> Contents:
    if _has_graph(tensor) or tensor.is_inference():
        return ()
    if tensor.layout is not torch.strided:
        parts = strided_parts(tensor)
        small = (part for part in parts if part.numel() <= _LARGE)
        return tensor._version, tuple(part.data_ptr() for part in parts), *small
    place = tensor._version, tensor.data_ptr()
    return (*place, tensor.detach()) if tensor.numel() <= _LARGE else place


def _read_array(array: np.ndarray[Any, Any]) -> Contents:
    return array.dtype.str, array.shape, array.tobytes()


def _read_object(value: Any) -> Contents:
    """Return the attributes of an object, and its items if it is a container too."""
    own = getattr(value, "__dict__", {})
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    held = [getattr(value, name) for name in slots if hasattr(value, name)]
    return type(value), *own, *own.values(), *held, *_items(value)


def _slots_of(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in names if not name.startswith("__")]


def _items(value: Any) -> Contents:
    if isinstance(value, dict):
        return *value, *value.values()
    if isinstance(value, list | tuple | collections.deque):
        return tuple(value)
    if isinstance(value, set | frozenset):
        return (frozenset(value),)
    return (bytes(value),) if isinstance(value, bytearray) else ()


_READERS: dict[type, Callable[[Any], Contents]] = {
    list: tuple,
    tuple: tuple,
    dict: lambda value: (*value, *value.values()),
    set: lambda value: (frozenset(value),),
    torch.Tensor: _read_tensor,
    np.ndarray: _read_array,
    functools.partial: lambda value: (value.func, value.args, value.keywords),
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
    return isinstance(value, torch.Tensor) and _has_graph(value)


def _can_be_carried(value: Any) -> bool:
    """Return whether a copy's attribute can be set to a copy of `value`, which nothing shares."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    if type(value) in _PLAIN:
        return all(map(_can_be_carried, _items(value)))
    return isinstance(value, (*_SCALARS, type, types.FunctionType, types.BuiltinFunctionType))


def _carried(value: Any, device: Device) -> Any:
    if isinstance(value, torch.Tensor):
        return carry(value, device)
    if type(value) in (list, tuple):
        return type(value)(_carried(one, device) for one in value)
    if type(value) is dict:
        return {key: _carried(one, device) for key, one in value.items()}
    return copy.copy(value)


# ---- tensors that were computed before the step


class StandIn(torch.Tensor):
    """Stands, while shards are computed, for a tensor that has a graph from before the step.

    A backward pass would go through that graph once for each shard, and from a copy of the model it
    would lead nowhere. Results that a forward pass keeps, and writes anew before anything reads
    them, do no harm: so a use is refused, not the attribute.

    Attributes:
        place: the name of the attribute that holds the tensor.
    """

    place: str

    @classmethod
    def at(cls, place: str) -> StandIn:
        """Return what stands for a tensor in the attribute `place`."""
        found = torch.Tensor._make_subclass(cls, torch.empty(0))
        found.place = place
        return found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse whatever is computed with it."""
        given: Any = (args, kwargs or {})
        leaves: list[object] = optree.tree_leaves(given)
        place = next(one.place for one in leaves if isinstance(one, StandIn))
        raise ContractError(
            f"a shard has used the attribute {place} of the model, which holds a tensor that was "
            f"computed before the step and has a graph: the shards of a step can't divide its "
            f"gradient. Compute it in forward, or set its value only: (...).detach()"
        )

    def __deepcopy__(self, memo: object) -> StandIn:
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.place})"


class ComputedBefore:
    """The tensors with a graph that attributes of a model hold, and what stands for each in shards.

    Args:
        modules: the modules of the user's model.

    Attributes:
        found: by place, what the attributes held at the last `follow`, and what stands for it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._seen: list[Sequence[Any]] = [()] * len(modules)
        self._in_module: list[Mapping[_Place, Any]] = [{}] * len(modules)
        self._now: Mapping[_Place, Any] = {}
        self._are_others = False
        self.found: dict[_Place, tuple[Any, Any]] = {}
        self._hidden: list[tuple[Any, Any, Any, Any]] = []

    def are_others(self) -> bool:
        """Whether the attributes hold others by now than at the last `follow`.

        Modules that hold the same objects as before, and no lists or dicts, are passed over.
        """
        looked = False
        for number, module in enumerate(self._modules):
            own, seen = module.__dict__, self._seen[number]
            if len(own) != len(seen) or not all(map(operator.is_, own.values(), seen)):
                self._look_into(number, own)
                looked = True
        if looked:
            now = {place: one for found in self._in_module for place, one in found.items()}
            self._now, known = now, self.found
            self._are_others = now.keys() != known.keys() or any(
                value is not known[place][0] for place, value in now.items()
            )
        return self._are_others

    def follow(self, copies: Iterable[tuple[Sequence[nn.Module], Device]]) -> None:
        """Take the tensors that the attributes held when `are_others` was last called.

        Args:
            copies: the modules of each copy, in which nothing stands for former ones any more.
        """
        before, self.found, self._are_others = self.found, {}, False
        names = [name for name, _ in self._modules[0].named_modules()]
        for place, value in self._now.items():
            name = f"{names[place[0]]}.{place[1]}".removeprefix(".")
            self.found[place] = value, _with_stand_ins(value, name)
        for modules, device in copies:
            for place in before.keys() - self.found.keys():
                self._withdraw(modules, device, place, before[place][1])

    def _look_into(self, number: int, own: Mapping[str, Any]) -> None:
        """Note the tensors with a graph, and the tuples with such, in attributes of a module."""
        found: dict[_Place, Any] = {}
        self._in_module[number], self._seen[number] = found, [*own.values()]
        for key, value in own.items():
            if isinstance(value, _MAY_HOLD_COMPUTED) and key not in _TORCHS_OWN:
                _find_computed((number, key), value, found)
                if isinstance(value, dict | list):
                    self._seen[number] = ()  # whose contents may change

    def hide(self, modules: Sequence[nn.Module]) -> None:
        """Put the stand-ins into the modules of the model, or of a copy."""
        for place, (value, stand_in) in self.found.items():
            holder = _holder_of(modules, place)
            if holder is not None:
                holder[place[-1]] = stand_in
                if modules is self._modules:
                    self._hidden.append((holder, place[-1], value, stand_in))

    def show(self) -> None:
        """Put the tensors back into the model, where forward has written nothing else."""
        while self._hidden:
            holder, key, value, stand_in = self._hidden.pop()
            if _at(holder, key) is stand_in:
                holder[key] = value

    def _withdraw(
        self, modules: Sequence[nn.Module], device: Device, place: _Place, stand_in: object
    ) -> None:
        """Take a stand-in out of a copy: the model holds something else there by now."""
        holder, mine = _holder_of(modules, place), _holder_of(self._modules, place)
        if holder is None or _at(holder, place[-1]) is not stand_in:
            return
        if mine is None or _at(mine, place[-1]) is _NOTHING:
            del holder[place[-1]]
        else:
            holder[place[-1]] = _carried(mine[place[-1]], device)


_Place: TypeAlias = "tuple[Any, ...]"
"""The number of a module, the name of an attribute, and keys in the dicts and lists that it holds.
"""

_MOST_ITEMS, _MOST_KEYS = 1000, 6  # of lists and dicts that are looked into in each step
_MAY_HOLD_COMPUTED = (torch.Tensor, list, tuple, dict)
_NOTHING = object()


def _find_computed(place: _Place, value: Any, found: dict[_Place, Any]) -> None:
    if isinstance(value, torch.Tensor):
        is_found = _has_graph(value)
    elif isinstance(value, tuple):
        leaves: list[object] = optree.tree_leaves(value)  # type: ignore[arg-type]
        is_found = any(isinstance(one, torch.Tensor) and _has_graph(one) for one in leaves)
    else:
        is_found = False
        is_looked_into = len(value) <= _MOST_ITEMS and len(place) <= _MOST_KEYS
        for key, held in _pairs_of(value) if is_looked_into else ():
            if isinstance(held, _MAY_HOLD_COMPUTED):
                _find_computed((*place, key), held, found)
    if is_found:
        found[place] = value


def _pairs_of(value: Any) -> Iterable[tuple[Any, Any]]:
    return [*value.items()] if isinstance(value, dict) else enumerate(value)


def _has_graph(tensor: torch.Tensor) -> bool:
    return type(tensor) is not StandIn and tensor.grad_fn is not None


def _with_stand_ins(value: Any, name: str) -> Any:
    def stand_in(leaf: Any) -> Any:
        is_computed = isinstance(leaf, torch.Tensor) and _has_graph(leaf)
        return StandIn.at(name) if is_computed else leaf

    return optree.tree_map(stand_in, value, none_is_leaf=True)


def _holder_of(modules: Sequence[nn.Module], place: _Place) -> Any:
    """Return the dict or the list that holds something in a place; None if there is no such."""
    number, *keys, last = place
    holder: Any = modules[number].__dict__
    for key in keys:
        holder = _at(holder, key)
        if not isinstance(holder, dict | list):
            return None
    if isinstance(holder, list) and last >= len(holder):
        return None
    return holder


def _at(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key, _NOTHING)
    return holder[key] if isinstance(key, int) and key < len(holder) else _NOTHING
