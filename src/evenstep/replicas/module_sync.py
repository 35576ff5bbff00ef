"""What a user does to the module between two steps, noticed and carried over to its copies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from evenstep.devices import Device, carry

_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}


def gradient_hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """Return the gradient hooks of a parameter (`register_hook`), by their numbers."""
    return parameter._backward_hooks or {}


def carry_over_attributes(
    mine: dict[str, Any], its: dict[str, Any], device: Device
) -> Iterator[Callable[[], None]]:
    """Yield, for each plain attribute in which a copied module is behind, what brings it over.

    Args:
        mine: the `__dict__` of a module of the user's.
        its: that of the copy.
        device: where the copy is.
    """
    for key, value in mine.items():
        theirs = its.get(key)
        if value is theirs or key in _MODULE_INTERNALS:
            continue
        if _differs(value, theirs):
            yield functools.partial(_carry_over, its, key, value, device)


def _carry_over(its: dict[str, Any], key: str, value: Any, device: Device) -> None:
    its[key] = carry(value, device) if isinstance(value, torch.Tensor) else copy.copy(value)


def _differs(mine: Any, its: Any) -> bool:
    """Say whether a plain value, a tensor, or a nesting of them is not what the copy has.

    Other objects count as equal: the copy has its own. So do results of a forward pass that a
    module keeps: they are no input of the next.
    """
    if mine is its:
        return False
    if isinstance(mine, int | float | str | bytes | None):
        return type(mine) is not type(its) or mine != its
    if isinstance(mine, torch.Tensor):
        if mine.grad_fn is not None or isinstance(mine, nn.Parameter):
            return False
        return not isinstance(its, torch.Tensor) or not torch.equal(mine, its.to(mine.device))
    if isinstance(mine, list | tuple):
        return type(mine) is not type(its) or len(mine) != len(its) or any(map(_differs, mine, its))
    if isinstance(mine, dict):
        return (
            type(mine) is not type(its)
            or mine.keys() != its.keys()
            or any(_differs(value, its[key]) for key, value in mine.items())
        )
    return False
