"""Data sets of images: Fashion-MNIST."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from evenstep.data import fashion_mnist
from evenstep.mxnet.gluon.data import transforms
from evenstep.mxnet.gluon.data.dataset import ArrayDataset

__all__ = ["FashionMNIST", "transforms"]


class FashionMNIST(ArrayDataset):
    """Fashion-MNIST: images of bytes (28, 28, 1), and labels of int32.

    Args:
        root: folder with the four files; None to download them once.
        train: the 60,000 training examples, otherwise the 10,000 test examples.
        transform: called with image and label of an example; None for no change.

    Raises:
        DataError: a file is missing, can't be downloaded, or is damaged.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        train: bool = True,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        images, labels = fashion_mnist(train, root).tensors
        whole = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        super().__init__(whole, labels.to(torch.int32))
        self._transform = transform

    def __getitem__(self, index: int) -> Any:
        """Return an image and its label."""
        image, label = super().__getitem__(index)
        return (image, label) if self._transform is None else self._transform(image, label)

    def batch(self, indices: torch.Tensor) -> list[torch.Tensor] | None:
        """Return some images and labels."""
        return None if self._transform is not None else super().batch(indices)
