"""The place of each gradient where every gradient has an owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.distributed.flat_buffers import Bucket, FlatSpace


class OwnerSpace(FlatSpace):
    """The place of each parameter's gradient where every gradient has an owner.

    Each vector is one bucket: it belongs to one owner, and can be allocated and freed by itself.

    Args:
        parameters: all parameters of a model.
        numbers: the parameters that have a place, roughly in the order of their places.
        owner_of: the owner of each parameter, by its number.
        nbytes: the least size of a vector; the last one of an owner and dtype may be smaller.

    Attributes:
        owners: the owner of each vector.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        numbers: Sequence[int],
        owner_of: Sequence[int],
        nbytes: int,
    ) -> None:
        order = {i: place for place, i in enumerate(numbers)}
        parts: list[tuple[int, tuple[int, ...]]] = []
        for owner in dict.fromkeys(owner_of[i] for i in numbers):
            own = FlatSpace(parameters, [i for i in numbers if owner_of[i] == owner])
            parts += [(owner, bucket.numbers) for bucket in own.buckets(nbytes)]
        parts.sort(key=lambda part: order[part[1][-1]])  # as a backward pass completes them
        self.owners = [owner for owner, _ in parts]
        self._lay_out(parameters, [members for _, members in parts])

    def buckets(self, nbytes: int = 0) -> list[Bucket]:
        """Return the vectors as buckets; their sizes are fixed already."""
        pairs = enumerate(zip(self._places, self._lengths, strict=True))
        return [Bucket(flat, 0, length, tuple(places)) for flat, (places, length) in pairs]

    def vector(self, flat: int) -> torch.Tensor:
        """Return a vector in fresh memory."""
        return torch.empty(self._lengths[flat], dtype=self._dtypes[flat])
