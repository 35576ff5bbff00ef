"""What a step is given, as a nesting that can be cut: mappings, dataclasses, constants."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE

from evenstep.batch.cut import Batch, dim_of, too_deep
from evenstep.batch.graphs import Template, is_graphs, refuse_graphs, tensors_in
from evenstep.batch.whole import Shared
from evenstep.errors import BatchError

_CONSTANTS = (bool, int, float, complex, str, bytes)

_register_node: Any = optree.register_pytree_node

# Module-level state, because optree has one registry for the process.
_REGISTERED = set[type[Any]]()
_REGISTERING = threading.Lock()


class Keywords(dict[str, Any]):
    """The keyword arguments that a step was called with: the last part of its batch."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number or a string of a batch, which every shard gets as it is."""

    value: Any


class Nesting:
    """Nests batches, and refuses lists that seem to hold something for each example.

    The tensors in a list are cut, each along its own examples; numbers and strings go to every
    shard. So a list with one item for each example would be misread. A list that was longer or
    shorter than a batch before is known not to be one, however many examples a later batch has.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._known = set[str]()

    def __call__(self, batch: Batch) -> Batch:
        """Return a batch as `nest` does.

        Raises:
            BatchError: a list has as many items as the batch has examples.
        """
        nested = nest(batch)
        refuse_graphs(batch)
        rows = (_rows_of(leaf, self._dim) for leaf in optree.tree_leaves(nested))
        examples = next((count for count in rows if count is not None), None)
        if examples is not None:
            self._refuse_lists(batch, examples)
        return nested

    def _refuse_lists(self, batch: Batch, examples: int) -> None:
        stack = [("batch", batch)]
        while stack:
            name, part = stack.pop()
            if isinstance(part, Mapping):
                stack += [(f"{name}[{key!r}]", value) for key, value in part.items()]
            elif isinstance(part, list | tuple):
                stack += [(f"{name}[{number}]", value) for number, value in enumerate(part)]
                self._refuse_list(name, part, examples)

    def _refuse_list(self, name: str, part: Sequence[Any], examples: int) -> None:
        is_plain = all(map(_is_plain, part))
        is_rows = isinstance(part, list) and all(
            _rows_of(one, self._dim) == examples for one in part
        )
        if len(part) != examples:
            self._known.add(name)
        elif examples > 1 and name not in self._known and (is_plain or is_rows):
            what = f"values of type {type(part[0]).__name__}" if is_plain else "tensors"
            raise BatchError(
                f"{name} is a {type(part).__name__} of {examples} {what} in a batch of {examples} "
                f"examples: " + (_ONE_VALUE_EACH if is_plain else _ONE_TENSOR_EACH)
            )


_ONE_VALUE_EACH = (
    "if there is one for each example, give a tensor, of which every shard gets its own rows; if "
    "every shard needs all of them, give evenstep.shared(torch.tensor(...)), or leave them out"
)
_ONE_TENSOR_EACH = (
    "if there is one for each example, give torch.stack(...) of them, or evenstep.Shards; if each "
    "has a row for each example, give a tuple"
)


def nest(batch: Batch) -> Batch:
    """Return what a step is given as a nesting of tensors, which can be cut into shards.

    A mapping of any kind becomes a dict. A dataclass stays one; numbers, strings and booleans go to
    every shard as they are, and so does None. The nesting may be of tuples, lists, mappings and
    dataclasses.

    Raises:
        BatchError: it is nested too deeply, or consists of strings.
    """
    if isinstance(batch, tuple) and batch and all(isinstance(one, str) for one in batch):
        raise BatchError(
            f"got the strings {', '.join(map(repr, batch))} and no tensor: if they are the names "
            f"in a batch that is a dict, write trainer.step(**batch)"
        )
    try:
        return optree.tree_map(_nested, batch, is_leaf=_is_constant)
    except RecursionError:
        raise too_deep() from None


def _nested(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | Shared | Constant):
        return leaf
    if isinstance(leaf, _CONSTANTS):
        return Constant(leaf)
    if isinstance(leaf, Mapping):
        return optree.tree_map(_nested, cast(Any, dict(leaf)))
    if is_graphs(leaf):
        _register(type(leaf), lambda one: (tensors_in(one), Template(one), None), Template.filled)
        return leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        _register_dataclass(type(leaf))
        return optree.tree_map(_nested, cast(Any, leaf))
    return leaf


def _is_constant(node: object) -> bool:
    return isinstance(node, Constant)


def _rows_of(leaf: object, dim: int) -> int | None:
    """Return the number of rows of a tensor that can be cut; None for anything else."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.ndim > 0:
        return leaf.shape[dim_of(leaf, dim)]
    return None


def _is_plain(value: object) -> bool:
    """Return whether a value is a constant, or a list of nothing but constants."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _CONSTANTS)


def _register_dataclass(kind: type[Any]) -> None:
    """Make optree take the instances of a dataclass apart, and put them together again."""
    names = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(one: Any) -> tuple[tuple[Any, ...], type[Any], None]:
        return tuple(getattr(one, name) for name in names), kind, None

    def unflatten(kind: type[Any], values: Iterable[Any]) -> Any:
        new = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # also of a frozen one
        return new

    _register(kind, flatten, unflatten)


def _register(
    kind: type[Any], flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]
) -> None:
    with _REGISTERING:
        if kind not in _REGISTERED:
            _register_node(kind, flatten, unflatten, namespace=EVERYWHERE)
            _REGISTERED.add(kind)


_register_node(
    Keywords,
    lambda given: (tuple(given.values()), tuple(given), None),
    lambda names, values: Keywords(zip(names, values, strict=True)),
    namespace=EVERYWHERE,
)
_register_node(
    Constant,
    lambda constant: ((), constant.value, None),
    lambda value, _: value,
    namespace=EVERYWHERE,
)
