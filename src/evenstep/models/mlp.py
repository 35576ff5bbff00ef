"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(
    in_features: int = 784, hidden: Sequence[int] = (256, 128), num_classes: int = 10
) -> nn.Sequential:
    """Return a multilayer perceptron with ReLU (Dive into Deep Learning, section 4.3).

    Args:
        in_features: number of values in one flattened example (784 = 1 x 28 x 28).
        hidden: widths of the hidden layers; may be empty.
        num_classes: width of the last layer.

    Returns:
        A module that maps float32 (n, ...), with `in_features` values in each example, to scores
        (n, num_classes).
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for narrow, wide in pairwise((in_features, *hidden)):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    last = hidden[-1] if hidden else in_features
    return nn.Sequential(*layers, nn.Linear(last, num_classes))
