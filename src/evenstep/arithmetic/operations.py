"""Which operations of torch portable arithmetic has, and what it runs for each.

An operation is *exact already* (`exact.py`: torch's own kernel, whose result IEEE-754 fixes), has a
*kernel* (C whose bits are fixed by the language), or is *composed* of those. Whatever is none of
them is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

KERNELS: dict[Any, Callable[..., Any]] = {}
"""What runs in place of an operation: called outside of the mode, so it must call nothing of torch
but what is exact already."""

COMPOSED: dict[Any, Callable[..., Any]] = {}
"""What runs in place of an operation: called inside the mode, so each of its own operations is
looked up in turn."""


def operation(name: str) -> Any:
    """Return an operation of torch, such as "add.Tensor"; None if this version has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def kernel(*names: str) -> Callable[[Function], Function]:
    """Let a function run in place of operations; it takes what they take, with their defaults.

    It returns `NotImplemented` for arguments that it has no kernel for.

    Args:
        names: the operations, such as "add.Tensor" or "exp", which is short for "exp.default".
    """
    return _registering(KERNELS, names)


def composed(*names: str) -> Callable[[Function], Function]:
    """Let a function that is made of other operations run in place of operations."""
    return _registering(COMPOSED, names)


def _registering(
    into: dict[Any, Callable[..., Any]], names: tuple[str, ...]
) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for found in filter(None, map(operation, names)):
            assert found not in into, f"{found} is registered twice"
            into[found] = function
        return function

    return register
