"""Shapes and dtypes, which are known before the values are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from evenstep.errors import MXNetError

_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}


class Spec(NamedTuple):
    """The shape and the dtype of an array."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """Return those of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def meta(self) -> torch.Tensor:
        """Return a tensor without memory that has them."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for a name, numpy's type or torch's dtype; None for float32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        return torch.float32
    name = str(dtype) if str(dtype) in _DTYPES else np.dtype(dtype).name
    if name not in _DTYPES:
        raise MXNetError(f"got dtype {name}: use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Return numpy's type for torch's dtype."""
    return np.dtype(str(dtype).removeprefix("torch.")).type
