"""Puts functions of torch under watch, and looks at tensors without leaving a trace."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import nn


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
    """Inside `with`, nothing of what is computed gets a graph, or a different dtype by autocast."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def is_scripting() -> bool:
    """Whether code is traced now, so that tensors have no values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def autocast_dtype() -> str | None:
    """Return the dtype of autocast; None if it is off."""
    return str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None


def arguments_in_order(module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return a call's arguments in the order of the module's signature, however they were given.

    A wrapper that passes them on has the signature of what it wraps.
    """
    if not named:
        return given
    try:
        signature = inspect.signature(module.forward)
        inner = next(wrapped_by(module), None)
        if inner is not None and all(one.kind in _REST for one in signature.parameters.values()):
            return arguments_in_order(inner, given, named)
        bound = signature.bind(*given, **named)
    except (TypeError, ValueError):  # a hook has changed them
        return given, sorted(named.items())
    rest = {one.name for one in signature.parameters.values() if one.kind is _REST[1]}
    return [
        [more for _, more in sorted(value.items())] if name in rest else value
        for name, value in bound.arguments.items()
    ]


_REST = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

WRAPPED = ("module", "_orig_mod", "_forward_module")
"""Where DistributedDataParallel, `torch.compile` and Lightning Fabric hold a model."""


def wrapped_by(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the model that a module wraps, if it does."""
    for name in WRAPPED:
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            yield inner


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
