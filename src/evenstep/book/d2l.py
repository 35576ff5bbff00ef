"""The names of Dive into Deep Learning's package, over evenstep.

    from evenstep import d2l  # instead of: from d2l import torch as d2l

After the book's `d2l` package (https://d2l.ai), as its sections 8.3, 8.4, "Training on Multiple
GPUs" and "Concise Implementation for Multiple GPUs" use it. Without GPUs its devices are evenstep's
CPU devices. Everything here is thin: a few lines over torch, or over a room of its own below.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from evenstep.collectives import tree_sum
from evenstep.data import Cursor, Loader, fashion_mnist
from evenstep.devices import Device, gpu_count, try_all_gpus
from evenstep.engine import Engine
from evenstep.models import resnet18
from evenstep.models.resnet import Residual as _Residual
from evenstep.shard.evaluation import evaluation_mode

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

Batches: TypeAlias = "Iterable[tuple[torch.Tensor, torch.Tensor]]"
Net: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


def try_gpu(i: int = 0) -> Device:
    """Return GPU `i`; without GPUs CPU device `i`, and without so many of them `cpu:0`."""
    if i < gpu_count():
        return Device("cuda", i)
    return Device("cpu", 0 if gpu_count() else i)


class Timer:
    """Times several runs of something; started when it is made."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        """Start a run."""
        self._began_s = time.perf_counter()

    def stop(self) -> float:
        """End the run; return its seconds."""
        self.times.append(time.perf_counter() - self._began_s)
        return self.times[-1]

    def avg(self) -> float:
        """Return the mean of the runs' seconds."""
        return self.sum() / len(self.times)

    def sum(self) -> float:
        """Return the seconds of all runs."""
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """Return for each run the seconds of it and those before it."""
        return [sum(self.times[: end + 1]) for end in range(len(self.times))]


class Benchmark:
    """Inside `with`, times what runs there, and says so with a description."""

    def __init__(self, description: str = "Done") -> None:
        self._description = description

    def __enter__(self) -> Benchmark:
        """Start."""
        self._timer = Timer()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Print the seconds."""
        print(f"{self._description}: {self._timer.stop():.4f} sec")


class Accumulator:
    """Sums over `n` numbers."""

    def __init__(self, n: int) -> None:
        self.data = [0.0] * n

    def add(self, *numbers: float) -> None:
        """Add to each sum."""
        self.data = [total + float(one) for total, one in zip(self.data, numbers, strict=True)]

    def reset(self) -> None:
        """Begin at 0 again."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, index: int) -> float:
        """Return a sum."""
        return self.data[index]


class Animator:
    """Draws curves as they grow: live in a notebook, else into a file; needs matplotlib.

    Args:
        xlabel, ylabel: of the axes.
        legend: a name for each curve.
        xlim, ylim: what the axes show; None to fit the curves.
        xscale, yscale: "linear" or "log".
        fmts: matplotlib's format of each curve.
        figsize: in inches.
        file: what is written outside a notebook.

    Attributes:
        X, Y: for each curve its points.
    """

    def __init__(
        self,
        xlabel: str = "",
        ylabel: str = "",
        legend: Sequence[str] = (),
        xlim: Sequence[float] | None = None,
        ylim: Sequence[float] | None = None,
        xscale: str = "linear",
        yscale: str = "linear",
        fmts: Sequence[str] = ("-", "m--", "g-.", "r:"),
        figsize: tuple[float, float] = (3.5, 2.5),
        file: str | Path = "animator.png",
    ) -> None:
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        limits = {"xlim": xlim, "ylim": ylim}
        self._axes = {
            "xlabel": xlabel,
            "ylabel": ylabel,
            "xscale": xscale,
            "yscale": yscale,
            **{name: ends for name, ends in limits.items() if ends and ends[0] != ends[1]},
        }
        self._legend = legend
        self._fmts = fmts
        self._figsize = figsize
        self._file = Path(file)

    def add(self, x: float | Sequence[float], y: float | Sequence[float | None]) -> None:
        """Add a point to each curve (None: to that one none), and draw.

        Args:
            x: of all points, or of each.
            y: of each curve, or of the only one.
        """
        ys = list(y) if isinstance(y, Sequence) else [y]
        xs = list(x) if isinstance(x, Sequence) else [x] * len(ys)
        while len(self.X) < len(ys):
            self.X.append([])
            self.Y.append([])
        for number, (one, value) in enumerate(zip(xs, ys, strict=True)):
            if value is not None:
                self.X[number].append(float(one))
                self.Y[number].append(float(value))
        self._draw()

    def _draw(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=self._figsize, layout="constrained")
        axes = figure.subplots()
        for xs, ys, form in zip(self.X, self.Y, self._fmts, strict=False):
            axes.plot(xs, ys, form)
        axes.set(**self._axes)
        axes.grid()
        if self._legend:
            axes.legend(self._legend)
        if _in_notebook():
            from IPython import display

            display.clear_output(wait=True)
            display.display(figure)
        else:
            figure.savefig(self._file, dpi=150)


class Residual(_Residual):
    """The book's residual block: `Residual(out)`, or with the channels that come in before it."""

    def __init__(self, *channels: int, use_1x1conv: bool = False, strides: int = 1) -> None:
        """Build the block.

        Args:
            channels: (in, out), as in the book's first edition; or (out,), as in its second, where
                the first batch tells what comes in.
            use_1x1conv: whether the shortcut has a convolution.
            strides: of the first convolution and the shortcut's.
        """
        entering = channels[0] if len(channels) == 2 else 1
        super().__init__(entering, channels[-1], use_1x1conv=use_1x1conv, stride=strides)
        if len(channels) == 1:
            self.conv1 = nn.LazyConv2d(channels[-1], 3, stride=strides, padding=1)
            if use_1x1conv:
                self.conv3 = nn.LazyConv2d(channels[-1], 1, stride=strides)


class _EachEpoch:
    """A loader as the book uses one: every `for` is the next epoch."""

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
        batch_size: examples in each.
        resize: side of the images, instead of 28.
        root: the folder with the data set's four files; None to download them once.

    Returns:
        two iterables of images, float32 (n, 1, 28, 28), 0 to 1, and labels, int64 (n,).
    """

    def batches(*, train: bool) -> _EachEpoch:
        images, labels = fashion_mnist(train, root).tensors
        if resize is not None:
            images = F.interpolate(images, (resize, resize), mode="bilinear", antialias=True)
        return _EachEpoch(Loader(TensorDataset(images, labels), batch_size, shuffle=train))

    return batches(train=True), batches(train=False)


def accuracy(y_hat: torch.Tensor, y: torch.Tensor) -> float:
    """Return how many of the predictions, scores (n, classes) or labels (n,), are right."""
    labels = y_hat.argmax(1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
    return float((labels.type(y.dtype) == y).sum())


def evaluate_accuracy(net: Net, data_iter: Batches) -> float:
    """Return the share of examples that a net, module or function, classifies rightly."""
    if isinstance(net, nn.Module):
        return evaluate_accuracy_gpu(net, data_iter)
    return _evaluated(net, data_iter, None)


def evaluate_accuracy_gpu(
    net: nn.Module, data_iter: Batches, device: Device | torch.device | None = None
) -> float:
    """Return the same for a module, computed where its parameters are, or on `device`."""
    where = device if device is not None else next(net.parameters()).device
    with evaluation_mode(net):
        return _evaluated(net, data_iter, where)


def evaluate_accuracy_gpus(
    net: nn.Module, data_iter: Batches, devices: Sequence[Device] | None = None
) -> float:
    """Return the same, each batch split over several devices that compute at the same time."""
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
    """Update parameters by their gradients' sums over a minibatch; set these to 0."""
    with torch.no_grad():
        for parameter in params:
            assert parameter.grad is not None
            parameter -= lr * parameter.grad / batch_size
            parameter.grad.zero_()


def split_and_load(data: torch.Tensor, devices: Sequence[Device]) -> list[torch.Tensor]:
    """Return a part of `data` for each device, in its memory; the first ones may be longer."""
    parts = data.tensor_split(len(devices))
    return [part.to(device.torch_device) for part, device in zip(parts, devices, strict=True)]


def split_batch(
    X: torch.Tensor, y: torch.Tensor, devices: Sequence[Device]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parts of images and labels for each device."""
    assert X.shape[0] == y.shape[0]
    return split_and_load(X, devices), split_and_load(y, devices)


def get_params(params: Iterable[torch.Tensor], device: Device) -> list[torch.Tensor]:
    """Return copies of parameters in a device's memory, ready to have gradients."""
    return [p.detach().to(device.torch_device, copy=True).requires_grad_() for p in params]


def allreduce(data: Sequence[torch.Tensor]) -> None:
    """Give every tensor (each may be on another device) the sum of all, in one canonical order."""
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
        params: weight and bias of two convolutions, then of two layers (as `X @ weight + bias`).
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
    """Train on a minibatch, data-parallel: split it, sum the gradients, update on every device.

    Args:
        X: images.
        y: labels.
        device_params: for each device its copy of the parameters.
        devices: where.
        lr: learning rate.
        net: `net(X, params)`, the scores.
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
            X, y = X.to(device), y.to(device)
        right += _count_right(net, X, y)
        counted += len(y)
    return right / counted


def _count_right(net: Net, X: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return accuracy(net(X), y)


def _in_notebook() -> bool:
    try:
        shell = get_ipython()  # type: ignore[name-defined]
    except NameError:
        return False
    return bool(shell.__class__.__name__ == "ZMQInteractiveShell")
