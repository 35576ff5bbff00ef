"""Data sets: examples by number, whole tensors where there are such, and transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from evenstep.errors import MXNetError
from evenstep.mxnet.core.array import NDArray


class Dataset:
    """Examples by number: a subclass defines `__getitem__` and `__len__`."""

    def __getitem__(self, index: int) -> Any:
        """Return an example."""
        raise NotImplementedError(f"{type(self).__name__} defines no __getitem__")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} defines no __len__")

    def transform(self, fn: Callable[..., Any], lazy: bool = True) -> Dataset:
        """Return the examples after a function of all their parts."""
        return _Transformed(self, fn)

    def transform_first(self, fn: Callable[..., Any], lazy: bool = True) -> Dataset:
        """Return the examples after a function of their first part."""
        return _Transformed(self, lambda first, *rest: (fn(first), *rest), fn)

    def batch(self, indices: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the parts of some examples as tensors, if that needs no work for each example."""
        return None


class SimpleDataset(Dataset):
    """The elements of a list."""

    def __init__(self, data: Sequence[Any]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        """Return an element."""
        return self._data[index]


class ArrayDataset(Dataset):
    """Rows of arrays: `ArrayDataset(features, labels)`."""

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise MXNetError("got no arrays: give at least one")
        self._tensors = [_as_tensor(one) for one in arrays]
        lengths = [len(one) for one in self._tensors]
        if len(set(lengths)) > 1:
            raise MXNetError(f"got arrays of {lengths} rows: give each the same number")

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        """Return an example: a row, or a tuple of rows."""
        rows = tuple(one[index].numpy() for one in self._tensors)
        return rows[0] if len(rows) == 1 else rows

    def batch(self, indices: torch.Tensor) -> list[torch.Tensor] | None:
        """Return some rows of each array."""
        return [one.index_select(0, indices) for one in self._tensors]


class _Transformed(Dataset):
    """Examples after a function.

    Args:
        inner: the examples.
        function: called with the parts of an example.
        of_first: the function of the first part, if it is nothing else.
    """

    def __init__(self, inner: Dataset, function: Callable[..., Any], of_first: Any = None) -> None:
        self._inner = inner
        self._function = function
        self._of_first = of_first

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        """Return an example."""
        example = self._inner[index]
        return self._function(*example) if isinstance(example, tuple) else self._function(example)

    def batch(self, indices: torch.Tensor) -> list[torch.Tensor] | None:
        """Return some examples, if the function can take whole batches."""
        whole = getattr(self._of_first, "of_batch", None)
        found = self._inner.batch(indices) if whole is not None else None
        return None if found is None or whole is None else [whole(found[0]), *found[1:]]


def _as_tensor(values: Any) -> torch.Tensor:
    """Return a tensor that shares no memory with an array of the program."""
    if isinstance(values, NDArray):
        return torch.from_numpy(values.asnumpy())
    if isinstance(values, torch.Tensor):
        return values
    array = np.asarray(values)
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array.copy())
