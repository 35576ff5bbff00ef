"""Flat vectors, some for each dtype, in which processes exchange gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from evenstep.collectives.table_rows import densified, write_rows
from evenstep.devices.addresses import ALIGNMENT
from evenstep.private_torch.tensors import copy_all

_VECTOR_BYTES = 16 << 20  # the allocator gives back larger ones at once, and then clears new ones

Gradients: TypeAlias = "Sequence[torch.Tensor | None]"
Vectors: TypeAlias = "Sequence[torch.Tensor] | Mapping[int, torch.Tensor]"
"""Flat vectors by their numbers, all of them or some."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A slice of a flat vector that is exchanged separately.

    Attributes:
        flat: the number of the vector.
        lo, hi: the elements [lo, hi) of the vector.
        numbers: the parameters whose gradients lie there.
    """

    flat: int
    lo: int
    hi: int
    numbers: tuple[int, ...]


class FlatSpace:
    """The place of each parameter's gradient in the flat vectors.

    The parameters that have one are given by `numbers`, in the order of their places.

    Attributes:
        nbytes: the size of all vectors together.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        by_dtype: dict[torch.dtype, list[list[int]]] = {}
        room: dict[torch.dtype, int] = {}
        for i in numbers:
            dtype, nbytes = parameters[i].dtype, parameters[i].nbytes
            if nbytes > room.get(dtype, 0):
                by_dtype.setdefault(dtype, []).append([])
                room[dtype] = _VECTOR_BYTES
            by_dtype[dtype][-1].append(i)
            room[dtype] -= nbytes
        self._lay_out(parameters, [members for found in by_dtype.values() for members in found])

    def _lay_out(
        self, parameters: Sequence[torch.Tensor], members: Sequence[Sequence[int]]
    ) -> None:
        """Give each vector its members, one behind another; those of a vector have one dtype."""
        self._shapes = [parameter.shape for parameter in parameters]
        # Without gaps, in the parameter's own dimension order, like its gradients.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self._dtypes = [parameters[first].dtype for first, *_ in members]
        self._places: list[dict[int, int]] = []
        self._lengths: list[int] = []
        for numbers in members:
            elements = (padded(parameters[i]) for i in numbers)
            *starts, length = itertools.accumulate(elements, initial=0)
            self._places.append(dict(zip(numbers, starts, strict=True)))
            self._lengths.append(length)
        sizes = zip(self._lengths, self._dtypes, strict=True)
        self._sizes = [length * dtype.itemsize for length, dtype in sizes]
        self.nbytes = sum(self._sizes)

    def is_like(self, other: FlatSpace) -> bool:
        """Whether every gradient has the same place in both."""
        return vars(self) == vars(other)

    def new(self, device: torch.device | None = None) -> list[torch.Tensor]:
        """Return vectors in fresh memory of a device, the CPU's by default."""
        sizes = zip(self._lengths, self._dtypes, strict=True)
        place = device or torch.device("cpu")
        return [torch.empty(length, dtype=dtype, device=place) for length, dtype in sizes]

    def over(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return vectors that lie in `memory`, uint8 (nbytes,)."""
        parts = [memory] if len(self._sizes) == 1 else memory.split(self._sizes)
        return [part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)]

    def buckets(self, nbytes: int) -> list[Bucket]:
        """Cut the vectors between parameters into pieces of at least `nbytes` (the last: any)."""
        found = []
        for flat, (places, dtype) in enumerate(zip(self._places, self._dtypes, strict=True)):
            numbers: list[int] = []
            lo = 0
            ends = [*places.values(), self._lengths[flat]][1:]
            for i, hi in zip(places, ends, strict=True):
                numbers.append(i)
                if (hi - lo) * dtype.itemsize >= nbytes or hi == self._lengths[flat]:
                    found.append(Bucket(flat, lo, hi, tuple(numbers)))
                    lo, numbers = hi, []
        return found

    @staticmethod
    def write(
        views: Mapping[int, torch.Tensor],
        bucket: Bucket,
        left: Gradients,
        right: Gradients | None = None,
    ) -> None:
        """Write the gradients of a bucket, left + right, into their views.

        A parameter without a gradient gets −0, the one number that changes no number it is added
        to (+0 turns −0 into +0).

        `left` and `right` have a gradient or None for each parameter of the bucket; without
        `right`, `left` is written alone. Sparse ones stand for dense ones.
        """
        own = [*map(views.__getitem__, bucket.numbers)]
        if right is None and not any(one is None or one.is_sparse for one in left):
            copy_all(own, left)
            return
        rights: Gradients = [None] * len(left) if right is None else right
        for view, ours, theirs in zip(own, left, rights, strict=True):
            one = theirs if ours is None else ours
            if one is None:
                view.fill_(-0.0)
            elif ours is None or theirs is None:
                write_rows(one, view) if one.is_sparse else view.copy_(one)
            elif ours.is_sparse and theirs.is_sparse:
                write_rows((ours + theirs).coalesce(), view)
            else:
                torch.add(densified(ours), densified(theirs), out=view)

    def views(self, vectors: Vectors) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each parameter's number and its gradient in `vectors`, laid out like it."""
        flats = vectors if isinstance(vectors, Mapping) else range(len(vectors))
        for flat in flats:
            vector = vectors[flat]
            offset, view = vector.storage_offset(), vector.as_strided
            for i, start in self._places[flat].items():
                yield i, view(self._shapes[i], self._strides[i], offset + start)


def padded(tensor: torch.Tensor) -> int:
    """Return how many elements a tensor takes up, so that what follows is aligned."""
    per = max(1, ALIGNMENT // tensor.element_size())
    return -(-tensor.numel() // per) * per
