"""The LeNet on which Dive into Deep Learning trains on several devices."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def lenet(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Return the network of Dive into Deep Learning, section 8.4.2.

    It is a variant of LeNet-5 (LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to
    document recognition, 1998) with ReLU and average pooling. The book draws the weights from a
    normal distribution of deviation 0.01; here they have torch's default initialisation.

    Args:
        num_classes: width of the last layer.
        in_channels: number of channels of the images.

    Returns:
        A module that maps images, float32 (n, in_channels, 28, 28), to scores (n, num_classes).
    """
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(in_channels, 20, kernel_size=3)),  # (n, 20, 26, 26)
        ("relu1", nn.ReLU()),
        ("pool1", nn.AvgPool2d(2)),  # (n, 20, 13, 13)
        ("conv2", nn.Conv2d(20, 50, kernel_size=5)),  # (n, 50, 9, 9)
        ("relu2", nn.ReLU()),
        ("pool2", nn.AvgPool2d(2)),  # (n, 50, 4, 4)
        ("flatten", nn.Flatten()),  # (n, 800)
        ("fc1", nn.Linear(800, 128)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(128, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))
