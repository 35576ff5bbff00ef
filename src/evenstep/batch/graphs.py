"""Batches of graphs, as PyTorch Geometric makes them, taken apart into tensors and put together."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import optree
import torch
from torch import nn

from evenstep.batch.cut import name_of
from evenstep.errors import BatchError


def is_graphs(value: object) -> bool:
    """Return whether a value is a graph or several, with the protocol of `torch_geometric.data`.

    `apply(function)` calls the function with every tensor, and keeps what it returns.
    """
    kind: Any = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor | nn.Module):
        return False
    return callable(getattr(kind, "apply", None)) and hasattr(kind, "num_nodes")


def tensors_in(graphs: Any) -> list[torch.Tensor]:
    """Return the tensors of graphs, in the order in which `Template.filled` takes them."""
    found: list[torch.Tensor] = []

    def note(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(value)
        return value

    copy.copy(graphs).apply(note)
    return found


class Template:
    """Graphs without regard to their tensors: two of one class are equal."""

    def __init__(self, graphs: Any) -> None:
        self._graphs = copy.copy(graphs)

    def filled(self, tensors: Iterable[Any]) -> Any:
        """Return a copy of the graphs that has these tensors."""
        left = iter(tensors)
        return copy.copy(self._graphs).apply(
            lambda value: next(left) if isinstance(value, torch.Tensor) else value
        )

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a template of graphs of the same class."""
        return isinstance(other, Template) and type(other._graphs) is type(self._graphs)

    def __hash__(self) -> int:
        """Return the same number for equal templates."""
        return hash(type(self._graphs))

    def __repr__(self) -> str:
        """Return the name of the class: the same text in each process."""
        return type(self._graphs).__name__


def examples_in(batch: Iterable[object]) -> int | None:
    """Return the number of graphs in the arguments of a step; None if there is not one number."""
    counts = {getattr(value, "num_graphs", 1) for value in batch if is_graphs(value)}
    return int(counts.pop()) if len(counts) == 1 else None


def refuse_graphs(batch: Any) -> None:
    """Refuse graphs outside of `evenstep.Shards`: their nodes can't be cut like examples."""
    paths, leaves, _ = optree.tree_flatten_with_path(batch, is_leaf=is_graphs)
    for path, leaf in zip(paths, leaves, strict=True):
        if is_graphs(leaf):
            raise BatchError(
                f"{name_of(path)} is a {type(leaf).__name__} of graphs, whose nodes and edges "
                f"can't be cut into shards like rows: make smaller batches of graphs, and give "
                f"them as micro-batches, trainer.step(evenstep.Shards([first, second, ...]))"
            )
