"""Transforms of images, for one image or for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from evenstep.mxnet.core.array import NDArray, adopt
from evenstep.mxnet.gluon.data.dataset import _as_tensor

__all__ = ["Cast", "Compose", "Normalize", "Resize", "ToTensor"]


class _Transform:
    """A transform of images (h, w, channels) or, after ToTensor, (channels, h, w)."""

    def of_batch(self, images: torch.Tensor) -> torch.Tensor:
        """Return images (n, ...) after the transform."""
        raise NotImplementedError

    def __call__(self, image: Any) -> Any:
        """Return one image after the transform, as an array."""
        found = self.of_batch(_as_tensor(image).unsqueeze(0)).squeeze(0)
        return adopt(found, None, type(image) if isinstance(image, NDArray) else NDArray)


class ToTensor(_Transform):
    """From bytes (h, w, channels) to float32 (channels, h, w) between 0 and 1."""

    def of_batch(self, images: torch.Tensor) -> torch.Tensor:
        """Return images (n, channels, h, w)."""
        return (images.to(torch.float32) / 255).permute(0, 3, 1, 2).contiguous()


class Resize(_Transform):
    """To a different size, bilinear: a number for squares, or (width, height)."""

    def __init__(self, size: int | Sequence[int]) -> None:
        self._size = (size, size) if isinstance(size, int) else (size[1], size[0])

    def of_batch(self, images: torch.Tensor) -> torch.Tensor:
        """Return images (n, h, w, channels) of the other size."""
        found = functional.interpolate(
            images.permute(0, 3, 1, 2).float(), self._size, mode="bilinear", antialias=True
        ).permute(0, 2, 3, 1)
        return found.round().to(images.dtype) if not images.is_floating_point() else found


class Normalize(_Transform):
    """Subtracts a mean and divides by a standard deviation, for each channel; after ToTensor."""

    def __init__(self, mean: Any = 0.0, std: Any = 1.0) -> None:
        self._mean = torch.as_tensor(mean, dtype=torch.float32).reshape(-1, 1, 1)
        self._std = torch.as_tensor(std, dtype=torch.float32).reshape(-1, 1, 1)

    def of_batch(self, images: torch.Tensor) -> torch.Tensor:
        """Return images (n, channels, h, w), normalised."""
        return (images - self._mean) / self._std


class Cast(_Transform):
    """To float32."""

    def of_batch(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of float32."""
        return images.to(torch.float32)


class Compose(_Transform):
    """Several transforms, one after another."""

    def __init__(self, transforms: Sequence[_Transform]) -> None:
        self._transforms = transforms

    def of_batch(self, images: torch.Tensor) -> torch.Tensor:
        """Return images after all transforms."""
        for transform in self._transforms:
            images = transform.of_batch(images)
        return images
