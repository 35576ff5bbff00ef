"""Many tensors as a few flat vectors, one for each dtype: what goes from process to process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_ALIGN_BYTES = 64  # a kernel may round differently at another alignment


class FlatSpace:
    """Where each of some parameters has its place in flat vectors.

    Args:
        parameters: of a model.
        numbers: which of them.

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

    def fill(
        self, vectors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Write gradients into vectors.

        Where there is none the place becomes −0, the one number to which any other can be added
        without changing it (+0 makes +0 of −0).
        """
        for i, view in self.views(vectors):
            gradient = gradients[i]
            if gradient is None:
                view.fill_(-0.0)
            else:
                view.copy_(gradient)

    def views(self, vectors: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each parameter's number and its place in vectors, laid out as the parameter is."""
        for places, vector in zip(self._places, vectors, strict=True):
            base = vector.storage_offset()
            for i, start in places.items():
                yield i, vector.as_strided(self._shapes[i], self._strides[i], base + start)


def _padded(tensor: torch.Tensor) -> int:
    per = max(1, _ALIGN_BYTES // tensor.element_size())
    return -(-tensor.numel() // per) * per
