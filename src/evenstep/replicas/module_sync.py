"""Finds what the user has changed in the module between two steps, and applies it to a copy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from evenstep.devices import Device, carry

_MODULE_INTERNALS = frozenset(nn.Module().__dict__) - {"training"}


def attribute_updates(
    mine: dict[str, Any], its: dict[str, Any], device: Device
) -> Iterator[Callable[[], None]]:
    """Yield a function for each plain attribute that the user has changed; it updates the copy's.

    Args:
        mine: the `__dict__` of one of the user's modules.
        its: the `__dict__` of its copy.
        device: the copy's device.
    """
    for key, value in mine.items():
        theirs = its.get(key)
        if value is not theirs and key not in _MODULE_INTERNALS and _differs(value, theirs):
            yield functools.partial(_update, its, key, value, device)


def _update(its: dict[str, Any], key: str, value: Any, device: Device) -> None:
    its[key] = carry(value, device) if isinstance(value, torch.Tensor) else copy.copy(value)


def _differs(mine: Any, its: Any) -> bool:
    """Return whether a plain value, a tensor, or a nesting of them differs from the copy's.

    Other objects count as equal: the copy has its own. So do results of a forward pass that a
    module keeps: the next forward pass doesn't read them.
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
