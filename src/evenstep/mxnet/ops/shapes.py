"""Functions that move elements: reshape, transpose, join, split, and select by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Function: TypeAlias = Callable[..., Any]


def as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a shape that may be given as one number."""
    return (shape,) if isinstance(shape, int) else tuple(int(one) for one in shape)


def wanted_shape(before: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape for torch: MXNet's 0 stands for the same size as before."""
    return tuple(
        before[i] if size == 0 and i < len(before) else size for i, size in enumerate(shape)
    )


def _reshape(data: Tensor, shape: Sequence[int], reverse: bool = False) -> Tensor:
    return data.reshape(wanted_shape(data.shape, as_shape(shape)))


def _transpose(data: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    return data.permute(*(tuple(axes) if axes else reversed(range(data.ndim))))


def _swapaxes(data: Tensor, dim1: int = 0, dim2: int = 0) -> Tensor:
    return data.swapaxes(dim1, dim2)


def _expand_dims(data: Tensor, axis: int) -> Tensor:
    return data.unsqueeze(axis)


def _squeeze(data: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
    return (
        data.squeeze()
        if axis is None
        else data.squeeze(axis if isinstance(axis, int) else tuple(axis))
    )


def _flatten_rows(data: Tensor) -> Tensor:
    return data.reshape(data.shape[0], -1)


def _concat(*data: Any, dim: int = 1) -> Tensor:
    return torch.cat(_listed(data), dim)


def _concatenate(seq: Sequence[Tensor], axis: int = 0) -> Tensor:
    return torch.cat(list(seq), axis)


def _stack(*data: Any, axis: int = 0) -> Tensor:
    return torch.stack(_listed(data), axis)


def _listed(data: Sequence[Any]) -> list[Tensor]:
    return list(data[0]) if len(data) == 1 and isinstance(data[0], list | tuple) else list(data)


def _split(data: Tensor, num_outputs: int, axis: int = 1, squeeze_axis: bool = False) -> Any:
    parts = data.split(data.shape[axis] // num_outputs, axis)
    return [part.squeeze(axis) for part in parts] if squeeze_axis else list(parts)


def _np_split(ary: Tensor, indices_or_sections: Any, axis: int = 0) -> Any:
    return list(torch.tensor_split(ary, indices_or_sections, axis))


def _slice(data: Tensor, begin: Sequence[Any], end: Sequence[Any], step: Sequence[Any] = ()) -> Any:
    steps = [*step, *[None] * (len(begin) - len(step))]
    return data[tuple(slice(*one) for one in zip(begin, end, steps, strict=True))]


def _slice_axis(data: Tensor, axis: int, begin: int, end: int | None) -> Tensor:
    length = data.shape[axis]
    stop = length if end is None else end + length if end < 0 else min(end, length)
    start = begin + length if begin < 0 else begin
    return data.narrow(axis, start, stop - start)


def _take(a: Tensor, indices: Tensor, axis: int = 0, mode: str = "clip") -> Tensor:
    """Select along an axis; indices beyond its ends are clipped, or wrapped with mode="wrap"."""
    length = a.shape[axis]
    places = indices.long()
    places = places % length if mode == "wrap" else places.clamp(0, length - 1)
    axis = axis % a.ndim
    found = a.index_select(axis, places.flatten())
    return found.reshape(*a.shape[:axis], *indices.shape, *a.shape[axis + 1 :])


def _pick(data: Tensor, index: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
    """Pick one element along an axis for each index; indices beyond its ends are clipped."""
    places = index.long().clamp(0, data.shape[axis] - 1)
    if places.ndim < data.ndim:
        places = places.unsqueeze(axis)
    found = data.gather(axis, places)
    return found if keepdims else found.squeeze(axis)


def _one_hot(indices: Tensor, depth: int, on_value: float = 1.0, off_value: float = 0.0) -> Tensor:
    hot = indices.long().unsqueeze(-1) == torch.arange(depth, device=indices.device)
    return torch.where(hot, on_value, off_value).to(torch.float32)


def _gather_nd(data: Tensor, indices: Tensor) -> Tensor:
    return data[tuple(indices.long())]


def _tile(data: Tensor, reps: int | Sequence[int]) -> Tensor:
    return data.tile(as_shape(reps))


def _repeat(data: Tensor, repeats: int, axis: int | None = None) -> Tensor:
    return data.repeat_interleave(repeats, axis)


def _broadcast_to(data: Tensor, shape: Sequence[int]) -> Tensor:
    return data.broadcast_to(wanted_shape(data.shape, as_shape(shape))).clone()


def _flip(data: Tensor, axis: int | Sequence[int]) -> Tensor:
    return data.flip(as_shape(axis))


def _pad(data: Tensor, mode: str, pad_width: Sequence[int], constant_value: float = 0.0) -> Tensor:
    pairs = [pad_width[i : i + 2] for i in range(0, len(pad_width), 2)]
    flat = [size for pair in reversed(pairs) for size in pair]
    if mode == "constant":
        return functional.pad(data, flat, value=constant_value)
    return functional.pad(data, flat[: 2 * (data.ndim - 2)], {"edge": "replicate"}.get(mode, mode))


def same(data: Tensor) -> Tensor:
    """Return the tensor itself, which becomes a copy in the array of the result."""
    return data


def select(data: Tensor, key: Any) -> Tensor:
    """Return `data[key]` for a key with arrays of indices or of conditions."""
    return data[as_indices(key)]


def as_indices(key: Any) -> Any:
    """Return a key in which arrays of numbers are integers, as torch wants them."""
    if isinstance(key, tuple):
        return tuple(as_indices(one) for one in key)
    if isinstance(key, Tensor) and key.dtype != torch.bool:
        return key.long()
    return key


class Index(NamedTuple):
    """A step to a part of a tensor.

    Attributes:
        key: numbers and slices.
        keeps_axis: whether a single element has shape (1,), as in `nd`.
    """

    key: Any
    keeps_axis: bool

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part, a view."""
        part = tensor[self.key]
        return part.reshape(1) if self.keeps_axis and not part.ndim else part


def fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether values of a shape can be written to all of a different shape."""
    own = list(shape)
    while len(own) > len(whole) and own[0] == 1:
        own = own[1:]
    pairs = zip(own[::-1], whole[::-1], strict=False)
    return len(own) <= len(whole) and all(one in (1, other) for one, other in pairs)


def is_basic(key: Any) -> bool:
    """Return whether a key has only numbers, slices, `None` and `...`: then the part is a view."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(one is None or one is Ellipsis or isinstance(one, int | slice) for one in parts)


def key_text(key: Any) -> str:
    """Return a key as it is written in Python, for messages."""
    parts = key if isinstance(key, tuple) else (key,)
    return ", ".join(
        ":".join("" if end is None else str(end) for end in (one.start, one.stop))
        if isinstance(one, slice)
        else str(one)
        for one in parts
    )


COMMON: dict[str, Function] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "swapaxes": _swapaxes,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "take": _take,
    "pick": _pick,
    "one_hot": _one_hot,
    "tile": _tile,
    "repeat": _repeat,
    "broadcast_to": _broadcast_to,
    "flip": _flip,
}
ND: dict[str, Function] = {
    **COMMON,
    "batch_flatten": _flatten_rows,
    "concat": _concat,
    "concatenate": _concatenate,
    "flatten": _flatten_rows,
    "gather_nd": _gather_nd,
    "pad": _pad,
    "reverse": _flip,
    "slice": _slice,
    "slice_axis": _slice_axis,
    "split": _split,
    "stack": _stack,
    "Concat": _concat,
    "Flatten": _flatten_rows,
    "Reshape": _reshape,
    "SwapAxis": _swapaxes,
}
NP: dict[str, Function] = {
    **COMMON,
    "concatenate": _concatenate,
    "flatten": torch.flatten,
    "ravel": torch.flatten,
    "split": _np_split,
    "stack": lambda arrays, axis=0: torch.stack(list(arrays), axis),
    "hstack": lambda arrays: torch.hstack(list(arrays)),
    "vstack": lambda arrays: torch.vstack(list(arrays)),
    "diag": torch.diag,
    "tril": torch.tril,
    "triu": torch.triu,
    "meshgrid": lambda *xi: list(torch.meshgrid(*xi, indexing="xy")),
    "nonzero": lambda a: list(torch.nonzero(a, as_tuple=True)),
    "unique": torch.unique,
}
NPX: dict[str, Function] = {
    "batch_flatten": _flatten_rows,
    "gather_nd": _gather_nd,
    "one_hot": _one_hot,
    "pick": _pick,
    "reshape": _reshape,
    "slice": _slice,
}
