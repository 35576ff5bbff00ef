"""Hides tensors that were computed before a step from its shards, and refuses to use them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import nn

from evenstep.devices import Device, carry
from evenstep.errors import ContractError

TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""The attributes in which torch keeps a module's parts."""


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
        found = torch.empty(0).as_subclass(cls)
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
            if isinstance(value, _MAY_HOLD_COMPUTED) and key not in TORCHS_OWN:
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
            holder[place[-1]] = carried(mine[place[-1]], device)


_Place: TypeAlias = "tuple[Any, ...]"
"""The number of a module, the name of an attribute, and keys in the dicts and lists that it holds.
"""

_MOST_ITEMS, _MOST_KEYS = 1000, 6  # of lists and dicts that are looked into in each step
_MAY_HOLD_COMPUTED = (torch.Tensor, list, tuple, dict)
_NOTHING = object()


def _find_computed(place: _Place, value: Any, found: dict[_Place, Any]) -> None:
    if isinstance(value, torch.Tensor):
        is_found = has_graph(value)
    elif isinstance(value, tuple):
        leaves: list[object] = optree.tree_leaves(value)  # type: ignore[arg-type]
        is_found = any(isinstance(one, torch.Tensor) and has_graph(one) for one in leaves)
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


def has_graph(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was computed from others that require gradients."""
    return type(tensor) is not StandIn and tensor.grad_fn is not None


def _with_stand_ins(value: Any, name: str) -> Any:
    def stand_in(leaf: Any) -> Any:
        is_computed = isinstance(leaf, torch.Tensor) and has_graph(leaf)
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


def carried(value: Any, device: Device) -> Any:
    """Return a copy of an attribute's value on a device, with all tensors in lists and dicts."""
    if isinstance(value, torch.Tensor):
        return carry(value, device)
    if type(value) in (list, tuple):
        return type(value)(carried(one, device) for one in value)
    if type(value) is dict:
        return {key: carried(one, device) for key, one in value.items()}
    return copy.copy(value)
