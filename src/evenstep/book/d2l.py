"""The names of Dive into Deep Learning's package, over evenstep.

    from evenstep import d2l  # instead of: from d2l import torch as d2l

These are the functions and classes of the book's `d2l` package (https://d2l.ai) that its sections
8.3, 8.4, "Training on Multiple GPUs" and "Concise Implementation for Multiple GPUs" use. Without
GPUs, devices are evenstep's CPU devices.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from evenstep import devices
from evenstep.book.animator import Animator
from evenstep.collectives import tree_sum
from evenstep.data import Cursor, Loader, fashion_mnist
from evenstep.devices import Device, gpu_count, try_all_gpus
from evenstep.engine import Engine
from evenstep.models import resnet18
from evenstep.models.resnet import Residual as _Residual
from evenstep.shard.evaluation import evaluation_mode

logger = logging.getLogger("evenstep")

__all__ = [
    "Accumulator",
    "Animator",
    "Benchmark",
    "Residual",
    "Timer",
    "accuracy",
    "allreduce",
    "evaluate_accuracy",
    "evaluate_accuracy_gpu",
    "evaluate_accuracy_gpus",
    "get_params",
    "lenet",
    "load_data_fashion_mnist",
    "resnet18",
    "sgd",
    "split_and_load",
    "split_batch",
    "train_batch",
    "try_all_gpus",
    "try_gpu",
]

Inputs: TypeAlias = "torch.Tensor | list[torch.Tensor]"
Batches: TypeAlias = "Iterable[tuple[Inputs, torch.Tensor]]"
_SAID: list[bool] = []
Net: TypeAlias = "Callable[[Any], torch.Tensor]"


def try_gpu(i: int = 0) -> Device:
    """Return GPU `i` or `cpu:0` if there is no such GPU; without any GPU, CPU device `i`."""
    return devices.try_gpu(i) if gpu_count() else Device("cpu", i)


class Timer:
    """A stopwatch for several runs, which starts when it is created."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        """Start a run."""
        self._began_s = time.perf_counter()

    def stop(self) -> float:
        """End the run and return its seconds."""
        self.times.append(time.perf_counter() - self._began_s)
        return self.times[-1]

    def avg(self) -> float:
        """Return the mean seconds of a run."""
        return self.sum() / len(self.times)

    def sum(self) -> float:
        """Return the total seconds of all runs."""
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """Return the accumulated seconds after each run."""
        return list(itertools.accumulate(self.times))


class Benchmark:
    """Prints the seconds that a `with` block takes, after a description."""

    def __init__(self, description: str = "Done") -> None:
        self._description = description

    def __enter__(self) -> Benchmark:
        """Start the stopwatch."""
        self._timer = Timer()
        return self

    def __exit__(self, *exception: object) -> None:
        """Print the seconds."""
        print(f"{self._description}: {self._timer.stop():.4f} sec")


class Accumulator:
    """Accumulates `n` sums."""

    def __init__(self, n: int) -> None:
        self.data = [0.0] * n

    def add(self, *numbers: float) -> None:
        """Add a number to each sum; with fewer numbers, to the first ones.

        Raises:
            ValueError: there are more numbers than sums.
        """
        if len(numbers) > len(self.data):
            raise ValueError(f"got {len(numbers)} numbers to add to {len(self.data)} sums")
        for place, one in enumerate(numbers):
            self.data[place] += float(one)

    def reset(self) -> None:
        """Set all sums to 0."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, index: int) -> float:
        """Return one of the sums."""
        return self.data[index]


class Residual(_Residual):
    """The book's residual block: `Residual(out)` or `Residual(in, out)`."""

    def __init__(self, *channels: int, use_1x1conv: bool = False, strides: int = 1) -> None:
        """Build the block.

        Args:
            channels: (in, out), as in the book's first edition; or (out,), as in its second, where
                the first batch determines the input channels.
            use_1x1conv: whether the shortcut has a convolution.
            strides: stride of the first convolution and of the shortcut's.
        """
        entering = channels[0] if len(channels) == 2 else 1
        super().__init__(entering, channels[-1], use_1x1conv=use_1x1conv, stride=strides)
        if len(channels) == 1:
            self.conv1 = nn.LazyConv2d(channels[-1], 3, stride=strides, padding=1)
            if use_1x1conv:
                self.conv3 = nn.LazyConv2d(channels[-1], 1, stride=strides)


class _EachEpoch:
    """A loader as the book uses one: each iteration over it is the next epoch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        return self._loader.epoch(Cursor(epoch=self._epoch - 1))


def load_data_fashion_mnist(
    batch_size: int, resize: int | None = None, root: str | None = None
) -> tuple[_EachEpoch, _EachEpoch]:
    """Return iterables over training and test batches of Fashion-MNIST.

    Args:
        batch_size: examples per batch.
        resize: side length of the images; None for 28.
        root: folder with the four files of the data set; None to download them once.

    Returns:
        two iterables of images, float32 (n, 1, 28, 28) from 0 to 1, and labels, int64 (n,).
    """

    def batches(*, train: bool) -> _EachEpoch:
        images, labels = fashion_mnist(train, root).tensors
        if resize is not None:
            images = F.interpolate(images, (resize, resize), mode="bilinear", antialias=True)
        return _EachEpoch(Loader(TensorDataset(images, labels), batch_size, shuffle=train))

    return batches(train=True), batches(train=False)


def accuracy(y_hat: torch.Tensor, y: torch.Tensor) -> float:
    """Return the number of correct predictions, scores (n, classes) or labels (n,)."""
    labels = y_hat.argmax(1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
    return float((labels.type(y.dtype) == y).sum())


def evaluate_accuracy(net: Net, data_iter: Batches) -> float:
    """Return the accuracy of a net, which is a module or a function."""
    if isinstance(net, nn.Module):
        return evaluate_accuracy_gpu(net, data_iter)
    return _evaluated(net, data_iter, None)


def evaluate_accuracy_gpu(
    net: nn.Module, data_iter: Batches, device: Device | torch.device | None = None
) -> float:
    """Return the accuracy of a module, computed on `device` or where its parameters are.

    The inputs of a batch are a tensor, or a list of tensors, as for the book's BERT.
    """
    _say_one_device(net)
    where = device if device is not None else next(net.parameters()).device
    with evaluation_mode(net):
        return _evaluated(net, data_iter, where)


def _say_one_device(net: nn.Module) -> None:
    """Say once that `nn.DataParallel` splits nothing where torch sees no GPU."""
    if isinstance(net, nn.DataParallel) and not net.device_ids and not _SAID:
        _SAID.append(True)
        logger.warning(
            "nn.DataParallel splits nothing here, since torch sees no GPU: one device computes all "
            "of it. To use all of them, leave it out, and write `with evenstep.Trainer(net, "
            "trainer, loss, devices=devices) as all_devices:` before the loop, and in the loop "
            "`l = all_devices.step(X, y)` alone"
        )


def evaluate_accuracy_gpus(
    net: nn.Module,
    data_iter: Iterable[tuple[torch.Tensor, torch.Tensor]],
    devices: Sequence[Device] | None = None,
) -> float:
    """Return the accuracy of a module, with each batch split over several devices."""
    right, counted = 0.0, 0
    home = next(net.parameters()).device
    with evaluation_mode(net), Engine(devices or try_all_gpus()) as engine:
        nets = [
            net if device.torch_device == home else copy.deepcopy(net).to(device.torch_device)
            for device in engine.devices
        ]
        for X, y in data_iter:
            X_shards, y_shards = split_batch(X, y, engine.devices)
            found = [
                engine.submit(_count_right, own, X_shard, y_shard, device=device)
                for own, X_shard, y_shard, device in zip(
                    nets, X_shards, y_shards, engine.devices, strict=True
                )
            ]
            right += sum(float(one) for one in found)
            counted += len(y)
    return right / counted


def sgd(params: Iterable[torch.Tensor], lr: float, batch_size: int) -> None:
    """Update parameters with gradients summed over a minibatch, and set these to 0."""
    with torch.no_grad():
        for parameter in params:
            assert parameter.grad is not None
            parameter -= lr * parameter.grad / batch_size
            parameter.grad.zero_()


def split_and_load(data: torch.Tensor, devices: Sequence[Device]) -> list[torch.Tensor]:
    """Return a part of `data` in the memory of each device; the first parts may be longer."""
    parts = data.tensor_split(len(devices))
    return [part.to(device.torch_device) for part, device in zip(parts, devices, strict=True)]


def split_batch(
    X: torch.Tensor, y: torch.Tensor, devices: Sequence[Device]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parts of images and labels for each device."""
    assert X.shape[0] == y.shape[0]
    return split_and_load(X, devices), split_and_load(y, devices)


def get_params(params: Iterable[torch.Tensor], device: Device) -> list[torch.Tensor]:
    """Return copies of parameters in a device's memory, with `requires_grad` set."""
    return [p.detach().to(device.torch_device, copy=True).requires_grad_() for p in params]


def allreduce(data: Sequence[torch.Tensor]) -> None:
    """Set every tensor to the sum of all, in the canonical order; devices may differ."""
    with torch.no_grad():
        here = data[0].device
        total = tree_sum([tensor.to(here, copy=True) for tensor in data], torch.add)
        assert total is not None
        for tensor in data:
            tensor.copy_(total)


def lenet(X: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the scores (n, 10) of the book's LeNet for images (n, 1, 28, 28).

    Args:
        X: the images.
        params: weight and bias of two convolutions and of two layers (`X @ weight + bias`).
    """
    hidden = X
    for weight, bias in zip(params[0:4:2], params[1:4:2], strict=True):
        hidden = F.avg_pool2d(F.relu(F.conv2d(hidden, weight, bias)), kernel_size=(2, 2))
    hidden = F.relu(hidden.flatten(1) @ params[4] + params[5])
    return hidden @ params[6] + params[7]


def train_batch(
    X: torch.Tensor,
    y: torch.Tensor,
    device_params: Sequence[Sequence[torch.Tensor]],
    devices: Sequence[Device],
    lr: float,
    net: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor] = lenet,
) -> None:
    """Train on a minibatch in data parallel: split it, sum the gradients, update on every device.

    Args:
        X: images.
        y: labels.
        device_params: copy of the parameters for each device.
        devices: devices to train on.
        lr: learning rate.
        net: `net(X, params)` returns the scores.
    """
    X_shards, y_shards = split_batch(X, y, devices)
    for X_shard, y_shard, params in zip(X_shards, y_shards, device_params, strict=True):
        F.cross_entropy(net(X_shard, params), y_shard, reduction="sum").backward()
    for gradients in zip(*([p.grad for p in params] for params in device_params), strict=True):
        allreduce([gradient for gradient in gradients if gradient is not None])
    for params in device_params:
        sgd(params, lr, X.shape[0])


def _evaluated(net: Net, data_iter: Batches, device: Any) -> float:
    right, counted = 0.0, 0
    for X, y in data_iter:
        if device is not None:
            X = [one.to(device) for one in X] if isinstance(X, list) else X.to(device)
            y = y.to(device)
        right += _count_right(net, X, y)
        counted += len(y)
    return right / counted


def _count_right(net: Net, X: Inputs, y: torch.Tensor) -> float:
    with torch.no_grad():
        return accuracy(net(X), y)
