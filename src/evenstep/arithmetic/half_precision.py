"""Operations in half precision: computed in float32, and rounded to half precision at their end."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch

from evenstep.private_torch.dispatch import written_by

HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})


def in_float32(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation with float32 copies of its tensors in half precision.

    Called inside the mode. Results are rounded to the dtype that torch promotes the tensors to, and
    what the operation writes to keeps its dtype.

    Returns:
        The results; `NotImplemented` for normalisation with tensors of several dtypes, where torch
        promotes differently.
    """
    given: Any = (args, dict(kwargs))
    floating = [one for one in optree.tree_leaves(given) if _is_floating(one)]
    promoted = _promoted(floating)
    if "norm" in operation.name() and any(one.dtype is not promoted for one in floating):
        return NotImplemented
    wide = optree.tree_map(lambda one: one.float() if _is_half(one) else one, given)
    result = operation(*wide[0], **wide[1])
    kept = {id(one): one for one in optree.tree_leaves(given)}  # float32 tensors may come back
    for place, name in written_by(operation):
        old, new = _argument(place, name, *given), _argument(place, name, *wide)
        kept[id(new)] = old if old is new else old.copy_(new)

    def rounded(one: Any) -> Any:
        if id(one) in kept:
            return kept[id(one)]
        is_wide = isinstance(one, torch.Tensor) and one.dtype is torch.float32
        return one.to(promoted) if is_wide and kwargs.get("dtype") is None else one

    return optree.tree_map(rounded, result)


def _promoted(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype that torch promotes tensors to; those without dimensions count last."""
    sized = [one.dtype for one in tensors if one.ndim] or [one.dtype for one in tensors]
    return functools.reduce(torch.promote_types, sized)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _argument(place: int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF_PRECISION
