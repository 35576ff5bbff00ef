"""Many tensors as a few flat vectors, one for each dtype: what goes from process to process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

Gradients: TypeAlias = "Sequence[torch.Tensor | None]"

_ALIGN_BYTES = 64  # a kernel may round differently at another alignment


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A piece of a flat vector that is exchanged at once.

    Attributes:
        flat: which vector.
        lo, hi: the elements [lo, hi) of it.
        numbers: of the parameters that have their places there.
    """

    flat: int
    lo: int
    hi: int
    numbers: tuple[int, ...]


class FlatSpace:
    """Where each of some parameters has its place in flat vectors.

    Args:
        parameters: of a model.
        numbers: which of them, in the order of their places.

    Attributes:
        nbytes: of all vectors together.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        # Without gaps, in the order of the parameter's own, as its gradients are.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self._dtypes = list(dict.fromkeys(parameters[i].dtype for i in numbers))
        self._places: list[dict[int, int]] = [{} for _ in self._dtypes]
        self._lengths = [0 for _ in self._dtypes]
        for i in numbers:
            flat = self._dtypes.index(parameters[i].dtype)
            self._places[flat][i] = self._lengths[flat]
            self._lengths[flat] += _padded(parameters[i])
        self.nbytes = sum(
            length * dtype.itemsize
            for length, dtype in zip(self._lengths, self._dtypes, strict=True)
        )

    def is_like(self, other: FlatSpace) -> bool:
        """Whether every place is the same."""
        return (self._places, self._shapes, self._strides, self._dtypes) == (
            other._places,
            other._shapes,
            other._strides,
            other._dtypes,
        )

    def new(self) -> list[torch.Tensor]:
        """Return vectors in fresh memory."""
        return self.over(torch.empty(self.nbytes, dtype=torch.uint8))

    def over(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return vectors that lie in `memory`, uint8 (nbytes,)."""
        sizes = [
            length * dtype.itemsize
            for length, dtype in zip(self._lengths, self._dtypes, strict=True)
        ]
        parts = memory.split(sizes)
        return [part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)]

    def buckets(self, nbytes: int) -> list[Bucket]:
        """Cut the vectors between parameters, into pieces of at least `nbytes` but for the last."""
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

    def write(
        self,
        vectors: Sequence[torch.Tensor],
        bucket: Bucket,
        left: Gradients,
        right: Gradients | None = None,
    ) -> None:
        """Write a bucket's gradients, left + right, into vectors.

        Where there is none the place becomes −0, the one number to which any other can be added
        without changing it (+0 makes +0 of −0).

        Args:
            vectors: where to.
            bucket: which part of them.
            left: a gradient or None for each of its parameters.
            right: likewise; None to write `left` alone.
        """
        rights: Gradients = [None] * len(left) if right is None else right
        for i, ours, theirs in zip(bucket.numbers, left, rights, strict=True):
            view = self._view(vectors, bucket.flat, i)
            one = theirs if ours is None else ours
            if one is None:
                view.fill_(-0.0)
            elif ours is None or theirs is None:
                view.copy_(one)
            else:
                torch.add(ours, theirs, out=view)

    def views(self, vectors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each parameter's number and its place in vectors, laid out as the parameter is."""
        for flat, places in enumerate(self._places):
            for i in places:
                yield i, self._view(vectors, flat, i)

    def _view(self, vectors: Sequence[torch.Tensor], flat: int, i: int) -> torch.Tensor:
        vector = vectors[flat]
        start = vector.storage_offset() + self._places[flat][i]
        return vector.as_strided(self._shapes[i], self._strides[i], start)


def _padded(tensor: torch.Tensor) -> int:
    per = max(1, _ALIGN_BYTES // tensor.element_size())
    return -(-tensor.numel() // per) * per
