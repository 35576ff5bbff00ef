"""Puts functions of torch under watch, and looks at tensors without leaving a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import optree
import torch


@contextlib.contextmanager
def replaced(owner: Any, name: str, watched: Callable[[Any], Any]) -> Iterator[None]:
    """Inside `with`, a function is another one, unless somebody has replaced that too."""
    before = getattr(owner, name)
    mine = watched(before)
    setattr(owner, name, mine)
    try:
        yield
    finally:
        if getattr(owner, name) is mine:
            setattr(owner, name, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside `with`, nothing of what is computed gets a graph, or another dtype by autocast."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def is_scripting() -> bool:
    """Whether code is traced now, so that tensors have no values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def autocast_dtype() -> str | None:
    """Return the dtype of autocast; None if it is off."""
    return str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in their order."""
    leaves: list[Any] = optree.tree_leaves(values, namespace="torch")
    return [leaf for leaf in _opened(leaves) if isinstance(leaf, torch.Tensor)]


def _opened(leaves: Iterable[Any]) -> Iterator[Any]:
    """Yield leaves; of outputs of models that are mappings of their own, the values."""
    for leaf in leaves:
        if isinstance(leaf, Mapping):
            yield from leaf.values()
        else:
            yield leaf


def examples_in(tensors: list[torch.Tensor]) -> int | None:
    """Return the size of the batch: of the first dimension of the first tensor that has one."""
    first = next((one for one in tensors if one.dim() > 0), None)
    return None if first is None else len(first)


def number_of(value: torch.Tensor) -> float | str:
    """Return a tensor of one value as JSON can hold it."""
    number = float(value.detach())
    return number if abs(number) < float("inf") else str(number)
