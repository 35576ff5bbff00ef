"""What all contenders share: job, network, batches, training step, timed loop, result."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from evenstep.bench import fresh
from evenstep.data import digits, fashion_mnist
from evenstep.models.registry import find_factory

BATCHES = 4  # number of different batches, used in turn
LEARNING_RATE = 0.01

DataName: TypeAlias = Literal["noise", "digits", "fashion-mnist"]
Batch: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
Step: TypeAlias = Callable[[torch.Tensor, torch.Tensor], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a contender trains, and how."""

    library: str = "evenstep"  # a key of `contenders.LIBRARIES`
    network: str  # "lenet", "resnet18", "mlp", or package.module:factory
    data: DataName = "noise"  # data set of the batches
    data_dir: str | None = None  # folder with the files of fashion-mnist; None to download them
    shape: Sequence[int] = (1, 28, 28)  # shape of an example of "noise"
    classes: int = 10  # number of labels of "noise"
    examples: int  # batch size over all processes and devices
    workers: int = 1  # number of processes (DDP, Accelerate, Fabric) or devices (evenstep)
    threads: int = 1  # intra-op threads per process; for evenstep per device
    memory_format: Any = "contiguous"  # "contiguous" or "channels_last"; for evenstep also "auto"
    precision: Any = "fp32"  # "fp32" or "bf16"; evenstep only
    shards: int = 8  # number of shards V; evenstep only
    max_in_flight: int = 1  # number of steps in flight; evenstep only
    hybridize: bool = False  # whether shards are compiled; evenstep only
    batch_norm: Any = "shard"  # "shard" or "sync"; evenstep only
    loads: bool = False  # whether a loader makes the batches during training; evenstep only
    warmup_steps: int  # number of steps before the timed ones
    steps: int  # number of timed steps

    @property
    def torch_format(self) -> torch.memory_format:
        """The memory format as torch names it."""
        channels_last = self.memory_format == "channels_last"
        return torch.channels_last if channels_last else torch.contiguous_format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A contender that is ready to train."""

    model: nn.Module  # the model, whose weights are compared with the initial ones in the end
    step: Step  # trains on one batch
    batches: Iterable[Batch]  # batches to train on; `in_memory` makes them endless
    synchronize: Callable[[], object] = lambda: None  # waits for all processes and steps in flight
    is_reporting: bool = True  # whether this process prints the result
    # returns further fields of the result, after the timed steps
    facts: Callable[[], Mapping[str, Any]] = dict


def run(
    libraries: Mapping[str, Callable[[Job], contextlib.AbstractContextManager[Training]]],
) -> None:
    """Time the library that the job in the first argument names, and print the result."""

    def measure(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        job = Job(**fields)
        with libraries[job.library](job) as training:
            timing = time_steps(job, training.batches, training.step, training.synchronize)
            if not training.is_reporting:
                return None
            return {**timing, **_result(job, timing["seconds"], training)}

    fresh.answer(measure)


def make_network(job: Job, *, in_format: bool = False) -> nn.Module:
    """Return the network in training mode, with the same initial weights for every contender.

    Args:
        job: the job.
        in_format: whether to convert the weights to the memory format of the job.
    """
    torch.manual_seed(0)
    model = find_factory(job.network)()
    if in_format:
        model.to(memory_format=job.torch_format)  # type: ignore[call-overload]
    return model


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    """Return plain SGD over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def make_step(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> Step:
    """Return the usual PyTorch training step, with images in the memory format of the job.

    Args:
        job: the job.
        model: returns scores (n, classes).
        optimizer: updates the model.
        backward: computes the gradients of a loss.
    """

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.to(memory_format=job.torch_format)
        optimizer.zero_grad()
        backward(F.cross_entropy(model(images), labels))
        optimizer.step()

    return step


def make_dataset(job: Job) -> TensorDataset:
    """Return images (n, *shape) and labels (n,) for BATCHES batches.

    A data set with fewer examples is repeated from its beginning.
    """
    count = BATCHES * job.examples
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


def time_steps(
    job: Job, batches: Iterable[Batch], step: Step, synchronize: Callable[[], object]
) -> dict[str, float]:
    """Time `job.steps` calls of `step` after the warm-up.

    Returns:
        "seconds" by the clock, until the last step is done; "user_s" and "kernel_s", the processor
        time of this process over all its threads; "page_faults" that needed no disk. Kernel time
        and page faults come mostly from memory that malloc returned to the system and requests
        again.
    """
    endless = iter(batches)
    for images, labels in itertools.islice(endless, job.warmup_steps):
        step(images, labels)
    synchronize()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for images, labels in itertools.islice(endless, job.steps):
        step(images, labels)
    synchronize()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "user_s": after.ru_utime - before.ru_utime,
        "kernel_s": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
    }


def _result(job: Job, seconds: float, training: Training) -> dict[str, Any]:
    """Return speed, facts, and how far the weights moved.

    Contenders that did the same work moved the weights by the same distance, up to rounding
    (unless the network has batch normalization).
    """
    initial = make_network(job).parameters()
    moved = [
        (trained.detach() - first.detach()).double().norm()
        for trained, first in zip(training.model.parameters(), initial, strict=True)
    ]
    return {
        "examples_per_s": job.steps * job.examples / seconds,
        "weights_moved": torch.stack(moved).norm().item(),
        "torch_threads": torch.get_num_threads(),
        **training.facts(),
    }
