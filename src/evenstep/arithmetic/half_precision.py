"""Operations in half precision: computed in float32, and rounded to half precision at their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from evenstep.private_torch.dispatch import written_by

HALF_PRECISION = frozenset({torch.bfloat16, torch.float16})


def in_float32(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation with float32 copies of its tensors in half precision.

    Called inside the mode. Results get the dtype of the first tensor in half precision, and so does
    what the operation writes to.
    """
    given: Any = (args, dict(kwargs))
    halves: list[torch.Tensor] = [one for one in optree.tree_leaves(given) if _is_half(one)]
    wide = optree.tree_map(lambda one: one.float() if _is_half(one) else one, given)
    result = operation(*wide[0], **wide[1])
    if places := written_by(operation):
        held = {
            id(new): old.copy_(new)
            for place, name in places
            for old, new in [(_argument(place, name, *given), _argument(place, name, *wide))]
            if old is not new
        }
        return optree.tree_map(lambda one: held.get(id(one), one), result)
    if kwargs.get("dtype") is not None:
        return result

    def rounded(one: Any) -> Any:
        is_wide = isinstance(one, torch.Tensor) and one.dtype is torch.float32
        return one.to(halves[0].dtype) if is_wide else one

    return optree.tree_map(rounded, result)


def _argument(place: int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF_PRECISION
