"""A job: what a contender trains, with its network, its batches and its training step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from evenstep.bench.workload.kinds import find_workload
from evenstep.data import digits, fashion_mnist
from evenstep.nn import slice_

BATCHES = 4  # number of different batches, used in turn

DataName: TypeAlias = Literal["noise", "digits", "fashion-mnist"]
Batch: TypeAlias = "Sequence[torch.Tensor]"
Step: TypeAlias = Callable[..., object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a contender trains, and how."""

    library: str = "evenstep"  # a key of `contenders.LIBRARIES`
    network: str  # a model, one of `kinds.TEXT`, or package.module:factory
    data: DataName = "noise"  # data set of the batches of images
    data_dir: str | None = None  # folder with the files of fashion-mnist; None to download them
    shape: Sequence[int] = (1, 28, 28)  # shape of an image of "noise"
    classes: int = 10  # number of labels of "noise"
    examples: int  # batch size over all processes and devices
    workers: int = 1  # number of processes (DDP, Accelerate, Fabric) or devices (evenstep)
    threads: int = 1  # intra-op threads per process; for evenstep per device
    memory_format: Any = "contiguous"  # or "channels_last"; for evenstep also "preserve"
    precision: Any = "fp32"  # "fp32" or "bf16"; evenstep only
    shards: int = 8  # number of shards V; evenstep only
    max_in_flight: int = 1  # number of steps in flight; evenstep only
    hybridize: bool = False  # whether shards are compiled; evenstep only
    batch_norm: Any = "shard"  # "shard" or "sync"; evenstep only
    slices: int = 0  # number of slices of each layer; 0 for whole layers; evenstep only
    loads: bool = False  # whether a loader makes the batches during training; evenstep only
    warmup_steps: int  # number of steps before the timed ones
    steps: int  # number of timed steps

    @property
    def devices(self) -> list[str]:
        """The names of as many CPU devices as there are workers."""
        return [f"cpu:{number}" for number in range(self.workers)]

    @property
    def torch_format(self) -> torch.memory_format:
        """The memory format as torch names it."""
        channels_last = self.memory_format == "channels_last"
        return torch.channels_last if channels_last else torch.contiguous_format


def make_network(job: Job, *, in_format: bool = False) -> nn.Module:
    """Return the network in training mode, with the same initial weights for every contender.

    With `in_format`, the weights are converted to the memory format of the job.
    """
    torch.manual_seed(0)
    model = find_workload(job.network).make_network().train()
    if job.slices:
        slice_(model, job.slices)
    if in_format:
        model.to(memory_format=job.torch_format)  # type: ignore[call-overload]
    return model


def make_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters: plain SGD for images, AdamW for text."""
    return find_workload(job.network).make_optimizer(model)


def make_step(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> Step:
    """Return the usual PyTorch training step, with images in the memory format of the job.

    `model` and `optimizer` may be what a library has made of them, and `backward` may be its own.
    """
    workload = find_workload(job.network)

    def step(*batch: torch.Tensor) -> None:
        in_format = (
            tensor.to(memory_format=job.torch_format) if tensor.ndim == 4 else tensor
            for tensor in batch
        )
        optimizer.zero_grad()
        backward(workload.loss(model, *in_format))
        optimizer.step()

    return step


def make_dataset(job: Job) -> TensorDataset:
    """Return the examples of BATCHES batches.

    These are images (n, *shape) and labels (n,), or what the text of the workload needs. A data set
    with fewer examples is repeated from its beginning.
    """
    count = BATCHES * job.examples
    if make_examples := find_workload(job.network).make_examples:
        return TensorDataset(*make_examples(count))
    if job.data == "noise":
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(count, *job.shape, generator=generator)
        return TensorDataset(images, torch.randint(job.classes, (count,), generator=generator))
    examples = digits(train=True) if job.data == "digits" else fashion_mnist(True, job.data_dir)
    numbers = torch.arange(count) % len(examples)
    return TensorDataset(*(tensor[numbers] for tensor in examples.tensors))


def make_loader(
    job: Job, processes: int = 1, sampler: Sampler[int] | None = None
) -> DataLoader[Any]:
    """Return the loader of one of `processes` processes, with its share of each batch."""
    return DataLoader(make_dataset(job), batch_size=job.examples // processes, sampler=sampler)


def in_memory(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Repeat batches from memory without end, so that no time is spent on loading."""
    return itertools.cycle(list(batches))
