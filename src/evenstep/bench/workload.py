"""What every contender shares: the job, the network, the batches, the timed loop, the line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from evenstep.data import digits, fashion_mnist
from evenstep.models.registry import find_factory

BATCHES = 4  # different batches, used in turn
LEARNING_RATE = 0.01

DataName: TypeAlias = Literal["noise", "digits", "fashion-mnist"]
Batch: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one contender is to do.

    Attributes:
        network: "lenet", "resnet18", "mlp", or package.module:factory.
        data: what the batches are made of.
        data_dir: where the files of fashion-mnist lie; None to download them.
        shape: of an example of "noise".
        classes: how many labels "noise" has.
        examples: in a batch, over all processes and devices.
        workers: processes (DDP, Accelerate, Fabric) or devices (evenstep).
        threads: intra-op threads of each process (evenstep: of each device).
        memory_format: "contiguous" or "channels_last"; for evenstep also "auto".
        precision: "fp32" or "bf16"; evenstep only.
        shards: V; evenstep only.
        max_in_flight: steps at once; evenstep only.
        hybridize: whether shards are compiled; evenstep only.
        batch_norm: "shard" or "sync"; evenstep only.
        loads: whether batches are put together while it trains; evenstep only.
        warmup_steps: not timed.
        steps: timed.
    """

    network: str
    data: DataName = "noise"
    data_dir: str | None = None
    shape: Sequence[int] = (1, 28, 28)
    classes: int = 10
    examples: int
    workers: int = 1
    threads: int = 1
    memory_format: Any = "contiguous"
    precision: Any = "fp32"
    shards: int = 8
    max_in_flight: int = 1
    hybridize: bool = False
    batch_norm: Any = "shard"
    loads: bool = False
    warmup_steps: int
    steps: int

    @property
    def torch_format(self) -> torch.memory_format:
        """The memory format as torch names it."""
        channels_last = self.memory_format == "channels_last"
        return torch.channels_last if channels_last else torch.contiguous_format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What the timed steps took.

    Attributes:
        seconds: by the clock.
        user_s: processor time of this process (of several: the first), over all its threads.
        kernel_s: likewise, inside the kernel: mostly memory that malloc gave back and asks for.
        page_faults: of this process that needed no disk: pages of such memory.
    """

    seconds: float
    user_s: float
    kernel_s: float
    page_faults: int


def read_job() -> Job:
    """Return the job that the first argument spells in JSON."""
    return Job(**json.loads(sys.argv[1]))


def make_network(job: Job) -> nn.Module:
    """Return the network in training mode; its weights are the same for every contender."""
    torch.manual_seed(0)
    return find_factory(job.network)()


def laid_out(model: nn.Module, job: Job) -> nn.Module:
    """Return the model with its weights in the job's memory format."""
    return model.to(memory_format=job.torch_format)  # type: ignore[call-overload, no-any-return]


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    """Return plain SGD over all parameters."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def make_dataset(job: Job) -> TensorDataset:
    """Return BATCHES batches: images (n, *shape) and labels (n,) of the classes.

    A data set that has fewer examples than that is taken again from its beginning.
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
    """Return the loader of one of `processes` processes: its share of each batch."""
    return DataLoader(make_dataset(job), batch_size=job.examples // processes, sampler=sampler)


def again_and_again(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Yield batches that lie ready in memory: loading data is nobody's part then."""
    return itertools.cycle(list(batches))


def time_steps(
    job: Job,
    batches: Iterable[Batch],
    step: Callable[[torch.Tensor, torch.Tensor], object],
    meet: Callable[[], object] = lambda: None,
) -> Timing:
    """Time `job.steps` calls of `step`, after the warm-up, with endless `batches`.

    `meet` is the barrier of a contender with several processes, and where evenstep waits for its
    steps in flight; the time runs until the last of them is done.
    """
    endless = iter(batches)
    for images, labels in itertools.islice(endless, job.warmup_steps):
        step(images, labels)
    meet()
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for images, labels in itertools.islice(endless, job.steps):
        step(images, labels)
    meet()
    seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return Timing(
        seconds=seconds,
        user_s=now.ru_utime - used.ru_utime,
        kernel_s=now.ru_stime - used.ru_stime,
        page_faults=now.ru_minflt - used.ru_minflt,
    )


def report(job: Job, timing: Timing, model: nn.Module, **more: Any) -> None:
    """Print the contender's line.

    `weights_moved` is the distance of the trained weights from the first ones: what shows that the
    contenders did the same work (equal within rounding where a network has no batch normalisation).
    """
    moved = [
        (trained.detach() - first.detach()).double().norm()
        for trained, first in zip(model.parameters(), make_network(job).parameters(), strict=True)
    ]
    line = {
        **dataclasses.asdict(timing),
        "examples_per_s": job.steps * job.examples / timing.seconds,
        "weights_moved": torch.stack(moved).norm().item(),
        "torch_threads": torch.get_num_threads(),
        **more,
    }
    print(json.dumps(line), flush=True)
