"""The ResNet-18 on which Dive into Deep Learning trains on several devices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two 3x3 convolutions with a shortcut connection (He, Zhang, Ren, Sun 2016, figure 2).

    The children have the names of the book's `d2l.Residual`. As in the book, and unlike in the
    paper, no batch normalisation follows the 1x1 convolution of the shortcut.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        use_1x1conv: bool = False,
        stride: int = 1,
    ) -> None:
        """Create the block; without `use_1x1conv`, input and output must have the same shape."""
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv3 = nn.Conv2d(in_channels, out_channels, 1, stride=stride) if use_1x1conv else None
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, in_channels, h, w) to (n, out_channels, ceil(h / stride), ceil(w / stride))."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        shortcut = x if self.conv3 is None else self.conv3(x)
        return F.relu(y + shortcut)


def resnet18(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Return the ResNet-18 of Dive into Deep Learning, "Concise Implementation for Multiple GPUs".

    It is the network of He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (CVPR
    2016), table 1, adapted to small images: a 3x3 stem of stride 1, and no max-pooling. The
    children have the book's names, so that weights saved there can be loaded here.

    Args:
        num_classes: width of the last layer.
        in_channels: number of channels of the images.

    Returns:
        A module that maps images, float32 (n, in_channels, h, w), to scores (n, num_classes).
    """
    net = nn.Sequential(
        nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1),  # (n, 64, h, w)
        nn.BatchNorm2d(64),
        nn.ReLU(),
    )
    net.add_module("resnet_block1", _stage(64, 64, residuals=2, first=True))
    net.add_module("resnet_block2", _stage(64, 128, residuals=2))  # (n, 128, h/2, w/2)
    net.add_module("resnet_block3", _stage(128, 256, residuals=2))  # (n, 256, h/4, w/4)
    net.add_module("resnet_block4", _stage(256, 512, residuals=2))  # (n, 512, h/8, w/8)
    net.add_module("global_avg_pool", nn.AdaptiveAvgPool2d((1, 1)))
    net.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(512, num_classes)))
    return net


def _stage(
    in_channels: int, out_channels: int, *, residuals: int, first: bool = False
) -> nn.Sequential:
    """Return a chain of residual blocks; every stage except the first halves the image size."""
    entry = (
        Residual(in_channels, out_channels)
        if first
        else Residual(in_channels, out_channels, use_1x1conv=True, stride=2)
    )
    rest = [Residual(out_channels, out_channels) for _ in range(residuals - 1)]
    return nn.Sequential(entry, *rest)
