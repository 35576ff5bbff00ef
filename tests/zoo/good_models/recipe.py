"""What a model of the zoo is made of, and the batches that many of them share."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
SPARSE_ADAM = functools.partial(torch.optim.SparseAdam, lr=0.01)


def trainable(optimizer):
    """Give an optimizer the parameters that require a gradient."""
    return lambda parameters: optimizer([one for one in parameters if one.requires_grad])


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and how it is trained: by `loss`, on batches (X, y), or by `objective`.

    `make_batch(n)` returns the arguments of a step: n examples, drawn from the default generator.
    `unjudged` is a part of the reason why the self-check can't tell whether the loss adds up.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[..., torch.Tensor] | None = None
    objective: Callable[..., tuple[torch.Tensor, Any]] | None = None
    make_optimizer: Callable[..., torch.optim.Optimizer] = SGD
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unjudged: str = ""


def images(channels=1, size=8, classes=5):
    return lambda n: (torch.randn(n, channels, size, size), torch.randint(classes, (n,)))


def vectors(width=6, classes=5):
    return lambda n: (torch.randn(n, width), torch.randint(classes, (n,)))


def numbers(width=6, outputs=1):
    return lambda n: (torch.randn(n, width), torch.randn(n, outputs))


def sequences(length=7, width=4, classes=5):
    return lambda n: (torch.randn(n, length, width), torch.randint(classes, (n,)))


def tokens(length=8, vocabulary=11):
    return lambda n: (torch.randint(vocabulary, (n, length)),)


def labelled_tokens(length=8, vocabulary=11, classes=5):
    return lambda n: (torch.randint(vocabulary, (n, length)), torch.randint(classes, (n,)))


def padded(make_batch, length=8):
    """Add to a batch the length of each of its sequences."""
    return lambda n: (*make_batch(n), torch.randint(length // 2, length + 1, (n,)))


def mlp(*widths):
    """Return linear layers with a ReLU between them."""
    layers = [nn.Linear(ins, outs) for ins, outs in itertools.pairwise(widths)]
    return nn.Sequential(
        *(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1]
    )


def summed(values):
    """Return a shard's (total, count) for one value per example."""
    return values.sum(), len(values)
