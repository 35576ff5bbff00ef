"""The names of Dive into Deep Learning's MXNet editions: `d2lzh`, and `d2l.mxnet`.

Only those that the chapters on computational performance use. What has no arrays in it is that of
`evenstep.d2l`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from evenstep.book.animator import Animator
from evenstep.book.d2l import Accumulator, Benchmark, Timer
from evenstep.book.d2l import load_data_fashion_mnist as _load_data
from evenstep.devices import gpu_count, usable_cores
from evenstep.mxnet.core.array import NDArray, adopt, array_class
from evenstep.mxnet.core.context import Context, cpu, gpu
from evenstep.mxnet.core.invoke import run
from evenstep.mxnet.core.operand import operator
from evenstep.mxnet.gluon import nn
from evenstep.mxnet.gluon.utils import split_and_load

__all__ = [
    "Accumulator",
    "Animator",
    "Benchmark",
    "Residual",
    "Timer",
    "accuracy",
    "evaluate_accuracy",
    "evaluate_accuracy_gpu",
    "evaluate_accuracy_gpus",
    "load_data_fashion_mnist",
    "resnet18",
    "sgd",
    "split_and_load",
    "split_batch",
    "try_all_gpus",
    "try_gpu",
]

Batches = Iterable[Any]
Net = Callable[[Any], Any]


def try_gpu(i: int = 0) -> Context:
    """Return GPU `i`, or cpu(0) if there is no such GPU; without any GPU, the stand-in gpu(i)."""
    return gpu(i) if i < gpu_count() or not gpu_count() else cpu()


def try_all_gpus() -> list[Context]:
    """Return all GPUs; without any, a stand-in for each core, at least two."""
    return [gpu(i) for i in range(gpu_count() or max(2, usable_cores()))]


class _Batches:
    """Batches of tensors as arrays on cpu(0); each iteration is the next epoch."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        like = array_class()
        for images, labels in self._inner:
            yield adopt(images, cpu(), like), adopt(labels.to(torch.int32), cpu(), like)


def load_data_fashion_mnist(
    batch_size: int, resize: int | None = None, root: str | None = None
) -> tuple[_Batches, _Batches]:
    """Return iterables over training and test batches of Fashion-MNIST.

    Args:
        batch_size: examples per batch.
        resize: side length of the images; None for 28.
        root: folder with the four files of the data set; None to download them once.

    Returns:
        two iterables of images, float32 (n, 1, 28, 28) from 0 to 1, and labels, int32 (n,).
    """
    train, test = _load_data(batch_size, resize, root)
    return _Batches(train), _Batches(test)


def sgd(params: Sequence[NDArray], lr: float, batch_size: int) -> None:
    """Update parameters of one context by gradients that are summed over a minibatch."""

    def update() -> None:
        with torch.no_grad():
            for parameter, gradient in zip(params, gradients, strict=True):
                parameter.value().sub_(gradient.value(), alpha=lr / batch_size)

    gradients: list[Any] = [parameter.grad for parameter in params]
    run("sgd", params[0].context, update, gradients, writes=params)


def split_batch(X: Any, y: Any, devices: Sequence[Context]) -> tuple[list[Any], list[Any]]:
    """Return the parts of images and labels on each context."""
    assert X.shape[0] == y.shape[0]
    even = X.shape[0] % len(devices) == 0
    return (
        split_and_load(X, devices, even_split=even),
        split_and_load(y, devices, even_split=even),
    )


def accuracy(y_hat: Any, y: Any) -> float:
    """Return the number of correct predictions, scores (n, classes) or labels (n,). Waits."""
    return float(_right(y_hat, y).asscalar())


def _right(y_hat: Any, y: Any) -> Any:
    labels = y_hat.argmax(axis=1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
    return (labels.astype("int32") == y.astype("int32")).astype("float32").sum()


def evaluate_accuracy(
    data_iter: Any, net: Any, ctx: Context | Sequence[Context] | None = None
) -> float:
    """Return the accuracy of a net, computed on one or several contexts.

    The first two arguments may be in the order of either edition of the book.
    """
    if callable(data_iter):
        data_iter, net = net, data_iter
    contexts = [cpu()] if ctx is None else [ctx] if isinstance(ctx, Context) else list(ctx)
    right, counted = 0.0, 0
    for X, y in data_iter:
        even = len(X) % len(contexts) == 0
        Xs, ys = (split_and_load(one, contexts, even_split=even) for one in (X, y))
        found = [_right(net(part), label) for part, label in zip(Xs, ys, strict=True)]
        right += sum(float(one) for one in found)
        counted += y.size
    return right / counted


def evaluate_accuracy_gpu(
    net: nn.Block, data_iter: Batches, device: Context | None = None
) -> float:
    """Return the accuracy of a block on a context, or on its parameters' first."""
    where = device or next(iter(net.collect_params().values())).list_ctx()[0]
    return evaluate_accuracy(data_iter, net, where)


def evaluate_accuracy_gpus(net: nn.Block, data_iter: Batches, split_f: Any = split_batch) -> float:
    """Return the accuracy of a block, with each batch split over the contexts of its parameters."""
    devices = next(iter(net.collect_params().values())).list_ctx()
    metric = Accumulator(2)
    for features, labels in data_iter:
        X_shards, y_shards = split_f(features, labels, devices)
        found = [_right(net(X), y) for X, y in zip(X_shards, y_shards, strict=True)]
        metric.add(sum(float(one) for one in found), labels.size)
    return metric[0] / metric[1]


class Residual(nn.HybridBlock):
    """The book's residual block."""

    def __init__(
        self, num_channels: int, use_1x1conv: bool = False, strides: int = 1, **options: Any
    ) -> None:
        super().__init__(**options)
        self.conv1 = nn.Conv2D(num_channels, kernel_size=3, padding=1, strides=strides)
        self.conv2 = nn.Conv2D(num_channels, kernel_size=3, padding=1)
        self.conv3 = (
            nn.Conv2D(num_channels, kernel_size=1, strides=strides) if use_1x1conv else None
        )
        self.bn1 = nn.BatchNorm()
        self.bn2 = nn.BatchNorm()

    def forward(self, X: Any, *others: Any) -> Any:
        """Return the images after the block."""
        relu = operator("nd", "relu")
        Y = self.bn2(self.conv2(relu(self.bn1(self.conv1(X)))))
        return relu(Y + (X if self.conv3 is None else self.conv3(X)))


def resnet18(num_classes: int) -> nn.HybridSequential:
    """Return the book's ResNet-18 for small images, uninitialized."""

    def blocks(num_channels: int, num_residuals: int, first_block: bool = False) -> Any:
        found = nn.HybridSequential()
        for i in range(num_residuals):
            if i == 0 and not first_block:
                found.add(Residual(num_channels, use_1x1conv=True, strides=2))
            else:
                found.add(Residual(num_channels))
        return found

    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(64, kernel_size=3, strides=1, padding=1), nn.BatchNorm(), nn.Activation("relu")
    )
    net.add(blocks(64, 2, first_block=True), blocks(128, 2), blocks(256, 2), blocks(512, 2))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    return net
