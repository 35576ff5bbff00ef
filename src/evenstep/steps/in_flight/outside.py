"""Notices changes of what steps in flight read outside of the model: numbers, words and tensors.

A shard of a step in flight reads a number in a closure, in a global variable or in an attribute of
the loss when its turn comes. If the user's loop sets the next step's number meanwhile, timing
decides which of the two it gets. So all that the code reads is noted when a step is submitted, as
far as its bytecode shows, and a change before the step was waited for is refused.

Not seen are: what lists and sets hold, attributes of Python modules, numpy arrays, writes to
tensors that torch doesn't count, what code of torch, numpy, logging and threads reads, and places
that the code itself writes to, which are taken for notes. Hooks are called once in a step, and may
keep whole modules (an average of the weights): of what they read, only numbers and words are looked
at.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from evenstep.errors import InputError
from evenstep.private_torch.modules import own_buffers, own_parameters
from evenstep.private_torch.tensors import version_of

_MOST_PLACES = 500
_MOST_LAYERS = 50  # of a module outside of the model
_LIBRARIES = ("torch", "numpy", "evenstep", "logging", "threading", "queue", "multiprocessing")
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
_WRITING = {"update", "setdefault", "pop", "popitem", "clear"}  # methods of dicts


class OutsideValues:
    """What some functions and objects read outside of the model.

    Args:
        model: the user's model, whose attributes the copies of it have.
        loss: the loss or the objective.
        hooks: what is called in the update; None for nothing.
    """

    def __init__(self, model: nn.Module, loss: object, hooks: Sequence[object]) -> None:
        self._model = model
        self._loss = loss
        self._hooks = [one for one in hooks if one is not None]
        self._places: list[_Place] = []

    def note(self) -> None:
        """Note what is there now."""
        if not self._places or next(self._changed(), None) is not None:
            of_loss = _Search(self._model, is_hook=False).places([self._loss])
            of_hooks = _Search(self._model, is_hook=True).places(self._hooks)
            self._places = [*of_loss, *of_hooks]

    def refuse_changed(self) -> None:
        """Refuse a change since `note`.

        Raises:
            InputError: names what has changed.
        """
        name = next(self._changed(), None)
        if name is None:
            return
        self._places = []
        raise InputError(
            f"{name} was changed with a step in flight, whose shards may have read the old value "
            f"or the new one: call trainer.waitall() before the change, or use max_in_flight=1. A "
            f"value for each step is best given in the batch, trainer.step(X, y, value), or set as "
            f"an attribute of the model, of which each step has its own"
        )

    def _changed(self) -> Iterator[str]:
        for name, holder, key, value, version in self._places:
            now = _at(holder, key)
            if (
                now is not value
                and not (isinstance(now, _PLAIN) and type(now) is type(value) and now == value)
            ) or (version >= 0 and version_of(now) != version):
                yield name


class _Place(NamedTuple):
    """Something that is read: its name, what holds it, under which key, the value, its version."""

    name: str
    holder: Any
    key: Any
    value: Any
    version: int


_MISSING = object()


def _at(holder: Any, key: Any) -> Any:
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:  # not bound yet
            return _MISSING
    return holder.get(key, _MISSING)


class _Names(NamedTuple):
    """The names that a function's code reads and writes."""

    reads: frozenset[str]
    attributes: frozenset[str]
    writes: frozenset[str]
    writes_items: bool


@functools.cache
def _names_in(code: types.CodeType) -> _Names:
    found = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    attributes = {name for op, name in found if op in ("LOAD_ATTR", "LOAD_METHOD")}
    stored = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL")
    reads = {name for op, name in found if op in ("LOAD_GLOBAL", "LOAD_NAME")}
    writes = {name for op, name in found if op in stored}
    writes_items = any(op in ("STORE_SUBSCR", "DELETE_SUBSCR") for op, _ in found)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names = _names_in(inner)
            reads, attributes = reads | names.reads, attributes | names.attributes
            writes, writes_items = writes | names.writes, writes_items or names.writes_items
    return _Names(
        frozenset(reads),
        frozenset(attributes),
        frozenset(writes),
        writes_items or not _WRITING.isdisjoint(attributes),
    )


class _Search:
    """Finds the places that code reads, from its functions on."""

    def __init__(self, model: nn.Module, *, is_hook: bool) -> None:
        self._is_hook = is_hook
        self._known = {id(one) for one in model.modules()}
        self._found: list[tuple[_Place, bool]] = []
        self._todo: list[tuple[str, Any]] = []
        self._objects: list[tuple[str, Any]] = []
        self._attributes = set[str]()
        self._writes = set[str]()
        self._writes_items = False

    def places(self, code: Sequence[object]) -> list[_Place]:
        """Return what functions and objects read, without what they write."""
        for one in code:
            if isinstance(one, nn.Module):
                self._read_module("the loss", one, with_tensors=True)
            else:
                self._todo.append((type(one).__name__, one))
        while self._todo or self._objects:
            if len(self._found) > _MOST_PLACES:
                break
            if self._todo:
                self._visit(*self._todo.pop())
            else:
                self._read_attributes(*self._objects.pop())
        return [
            place
            for place, is_item in self._found
            if place.key not in self._writes and not (is_item and self._writes_items)
        ]

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, (*_PLAIN, torch.Tensor)) or id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, functools.partial):
            self._todo += [(name, one) for one in (value.func, *value.args)]
            self._add(name, value.keywords, value.keywords, is_item=False)
        elif isinstance(value, types.MethodType):
            self._todo += [(type(value.__self__).__name__, value.__self__), (name, value.__func__)]
        elif isinstance(value, types.FunctionType):
            self._read_function(value)
        elif isinstance(value, torch.optim.Optimizer):
            if "param_groups" in self._attributes and not self._is_hook:
                self._read_groups(name, value)
        elif type(value) is dict and not self._is_hook:
            plain = {key: one for key, one in value.items() if isinstance(one, _PLAIN)}
            self._add(name, value, plain, is_item=True)
        elif isinstance(value, nn.Module | dict):
            if isinstance(value, nn.Module) and not self._is_hook:
                self._read_module(name, value, with_tensors=False)
        elif not isinstance(value, type | types.ModuleType) and not _is_of_a_library(type(value)):
            self._objects.append((name, value))

    def _add(self, name: str, holder: Any, read: Mapping[Any, Any], *, is_item: bool) -> None:
        for key, value in read.items():
            spelled = f"{name}[{key!r}]" if is_item else f"{name}.{key}" if name else str(key)
            version = -1
            counts = isinstance(value, torch.Tensor) and not value.is_inference()
            if counts and not self._is_hook:
                version = version_of(value)
            self._found.append((_Place(spelled, holder, key, value, version), is_item))
            self._todo.append((spelled, value))

    def _read_function(self, function: types.FunctionType) -> None:
        if _is_of_a_library(function):
            return
        names = _names_in(function.__code__)
        self._attributes |= names.attributes
        self._writes |= names.writes
        self._writes_items |= names.writes_items
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._add("", cell, {name: _at(cell, name)}, is_item=False)
        of_module = function.__globals__
        read = {name: of_module[name] for name in names.reads if name in of_module}
        self._add("", of_module, read, is_item=False)

    def _read_module(self, name: str, module: nn.Module, *, with_tensors: bool) -> None:
        layers = [*module.modules()]
        for layer in layers if len(layers) <= _MOST_LAYERS else ():
            self._known.add(id(layer))
            own = vars(layer)
            kinds = (*_PLAIN, torch.Tensor) if with_tensors else _PLAIN
            held = {
                key: one
                for key, one in own.items()
                if key[0] != "_" and key != "training" and isinstance(one, kinds)
            }
            self._add(name, own, held, is_item=False)
            for tensors in (own_parameters(layer), own_buffers(layer)) if with_tensors else ():
                self._add(name, tensors, tensors, is_item=False)
            self._todo.append((name, type(layer).forward))

    def _read_groups(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Take learning rates and other settings: the step has those of its time, not the code."""
        for number, group in enumerate(optimizer.param_groups):
            plain = {key: one for key, one in group.items() if isinstance(one, _PLAIN)}
            self._add(f"{name}.param_groups[{number}]", group, plain, is_item=True)

    def _read_attributes(self, name: str, value: Any) -> None:
        """Take the attributes of an object that the code reads, and its methods."""
        for kind in type(value).__mro__[:-1]:
            methods = {"__call__", *self._attributes} & vars(kind).keys()
            self._todo += [(name, vars(kind)[one]) for one in methods]
        own = getattr(value, "__dict__", {})
        while self._todo:  # methods read further attributes
            self._visit(*self._todo.pop())
        read = {key: own[key] for key in self._attributes & own.keys()}
        self._add(name, own, read, is_item=False)


def _is_of_a_library(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] in _LIBRARIES
