"""What a step is given, as a nesting that can be cut: mappings, dataclasses, constants."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any, cast

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE

from evenstep.batch.cut import Batch, dim_of, too_deep
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


def nest(batch: Batch, dim: int = 0) -> Batch:
    """Return what a step is given as a nesting of tensors, which can be cut into shards.

    A mapping of any kind becomes a dict. A dataclass stays one; numbers, strings and booleans go to
    every shard as they are, and so does None.

    Args:
        batch: any nesting of tuples, lists, mappings and dataclasses of tensors.
        dim: the dimension that the examples lie along.

    Raises:
        BatchError: a list has as many constants as the batch has examples.
    """
    if isinstance(batch, tuple) and batch and all(isinstance(one, str) for one in batch):
        raise BatchError(
            f"got the strings {', '.join(map(repr, batch))} and no tensor: if they are the names "
            f"in a batch that is a dict, write trainer.step(**batch)"
        )
    try:
        leaves = optree.tree_leaves(nested := optree.tree_map(_nested, batch, is_leaf=_is_constant))
    except RecursionError:
        raise too_deep() from None
    examples = [leaf.shape[dim_of(leaf, dim)] for leaf in leaves if _has_rows(leaf)]
    if examples:
        _refuse_constants_of_examples(batch, examples[0])
    return nested


def _nested(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | Shared | Constant):
        return leaf
    if isinstance(leaf, _CONSTANTS):
        return Constant(leaf)
    if isinstance(leaf, Mapping):
        return optree.tree_map(_nested, cast(Any, dict(leaf)))
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        _register(type(leaf))
        return optree.tree_map(_nested, cast(Any, leaf))
    return leaf


def _is_constant(node: object) -> bool:
    return isinstance(node, Constant)


def _has_rows(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.ndim > 0


def _refuse_constants_of_examples(batch: Batch, examples: int) -> None:
    """Refuse lists that seem to hold something of each example, since lists are not cut."""
    stack = [("batch", batch)]
    while stack:
        name, part = stack.pop()
        if isinstance(part, Mapping):
            stack += [(f"{name}[{key!r}]", value) for key, value in part.items()]
        elif isinstance(part, list | tuple):
            if len(part) == examples > 1 and all(map(_is_plain, part)):
                raise BatchError(
                    f"{name} is a {type(part).__name__} of {examples} values of type "
                    f"{type(part[0]).__name__} in a batch of {examples} examples: give a tensor, "
                    f"of which every shard gets its own rows, or leave it out"
                )
            stack += [(f"{name}[{number}]", value) for number, value in enumerate(part)]


def _is_plain(value: object) -> bool:
    """Return whether a value is a constant, or a list of nothing but constants."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _CONSTANTS)


def _register(kind: type[Any]) -> None:
    """Make optree take the instances of a dataclass apart, and put them together again."""
    names = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(one: Any) -> tuple[tuple[Any, ...], type[Any], None]:
        return tuple(getattr(one, name) for name in names), kind, None

    def unflatten(kind: type[Any], values: Iterable[Any]) -> Any:
        new = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # also of a frozen one
        return new

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
