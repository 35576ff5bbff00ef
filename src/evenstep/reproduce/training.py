"""A training on Fashion-MNIST that can be interrupted at any time and resumes where it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from evenstep.callbacks.lr_scaling import Rule, scale_lr
from evenstep.checkpoint.files import list_checkpoints
from evenstep.data import Loader
from evenstep.devices import Devices, gpu_count, try_all_gpus
from evenstep.limits import Precision
from evenstep.metrics import accuracy
from evenstep.models.registry import find_factory
from evenstep.profiling.trace import Span
from evenstep.reproduce.plan import Data
from evenstep.training.trainer import Trainer

Init: TypeAlias = Literal["book", "torch", "he"]
Say: TypeAlias = Callable[[str], object]

_SAVE_EVERY_S = 60.0
_SAY_EVERY_S = 10.0
_TIMELINE_STEPS = 3
_TEST_BATCH = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A training: the book's, or an improved one."""

    network: str  # name of a model
    devices: int  # number of devices; it does not change the result
    batch_size: int  # examples per minibatch
    lr: float  # learning rate of SGD for `base_batch_size`
    epochs: int  # number of epochs
    shards: int = 8  # number of shards V
    momentum: float = 0.0  # momentum of SGD
    # linear and convolutional weights: "book" draws them from N(0, 0.01²), "he" from N(0, 2 /
    # inputs) (He et al., "Delving Deep into Rectifiers", 2015), "torch" keeps them
    init: Init = "torch"
    precision: Precision = "fp32"  # "fp32" or "bf16"
    # the batch size that `lr` is meant for; None to use `lr` as it is
    base_batch_size: int | None = None
    warmup_epochs: int = 0  # number of epochs in which the rate grows to the scaled one
    decays: bool = False  # whether the rate then falls to 0 by the end
    rule: Rule = "linear"  # how the rate is scaled, "linear" or "sqrt"
    examples: int | None = None  # number of examples to train on; None for all
    test_examples: int | None = None  # number of examples to test with; None for all


def train(training: Training, data: Data, folder: Path, say: Say) -> dict[str, Any]:
    """Train to the end and return what there is to show.

    Args:
        training: the training.
        data: the data set.
        folder: folder for the checkpoints of this training, from which it resumes.
        say: called with lines of progress.

    Returns:
        "accuracies" and "seconds" of each epoch (seconds without evaluation), "fingerprint",
        "shares" (of the devices' time, in seconds) and "timeline" (spans of some steps on the
        devices). Shares and timeline cover only the last process that trained.
    """
    test = Loader(_first(data[1], training.test_examples), _TEST_BATCH, shuffle=False)
    curve = Curve()
    with _opened(training, data, folder, curve) as (trainer, loader, scheduler):
        total = training.epochs * len(loader)
        while (epoch := trainer.cursor.epoch) < training.epochs:
            began_s = time.perf_counter()
            for done in _announced(_steps(trainer, loader, scheduler), total, say):
                spent_s = time.perf_counter() - began_s
                if spent_s > _SAVE_EVERY_S and done % len(loader):
                    curve.spent_s += spent_s
                    trainer.save(folder, keep=1)
                    began_s = time.perf_counter()
            curve.spent_s += time.perf_counter() - began_s
            reached = trainer.evaluate(test, {"accuracy": accuracy})["accuracy"]
            curve.end_epoch(reached)
            trainer.save(folder, keep=1)
            say(f"epoch {epoch + 1} of {training.epochs}: accuracy {reached:.4f}")
        shares = {one.device: {**one.seconds, "shards": one.shards} for one in trainer.shares()}
        return {
            "accuracies": curve.accuracies,
            "seconds": curve.seconds,
            "fingerprint": trainer.fingerprint(),
            "shares": shares,
            "timeline": timeline(trainer.trace.spans, [device.name for device in trainer.devices]),
        }


def first_steps(training: Training, data: Data, steps: int) -> dict[str, Any]:
    """Return the fingerprint after the first `steps` steps of a training, and their seconds."""
    with _opened(training, data) as (trainer, loader, scheduler):
        began_s = time.perf_counter()
        for done in _steps(trainer, loader, scheduler):
            if done == steps:
                break
        seconds = time.perf_counter() - began_s
        return {"fingerprint": trainer.fingerprint(), "seconds": seconds, "steps": steps}


class Curve:
    """Accuracy and seconds of each epoch; kept in checkpoints, as a state of the user's.

    Attributes:
        accuracies: after each epoch.
        seconds: of each epoch, without evaluation.
        spent_s: of the epoch that has begun, so far.
    """

    def __init__(self) -> None:
        self.accuracies: list[float] = []
        self.seconds: list[float] = []
        self.spent_s = 0.0

    def end_epoch(self, accuracy: float) -> None:
        """Record the accuracy at the end of an epoch."""
        self.accuracies.append(accuracy)
        self.seconds.append(self.spent_s)
        self.spent_s = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        vars(self).update(state)


@contextlib.contextmanager
def _opened(
    training: Training, data: Data, folder: Path | None = None, curve: Curve | None = None
) -> Iterator[tuple[Trainer, Loader, LRScheduler | None]]:
    """Open the trainer, at the newest checkpoint in `folder` if there is one."""
    loader = Loader(_first(data[0], training.examples), training.batch_size)
    model = _make_network(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)
    scheduler = _make_scheduler(training, optimizer, len(loader))
    given = (model, optimizer, nn.CrossEntropyLoss())
    options: dict[str, Any] = {
        "devices": choose_devices(training.devices),
        "shards": training.shards,
        "precision": training.precision,
        "scheduler": scheduler,
        "state": {} if curve is None else {"curve": curve},
    }
    if folder is not None and list_checkpoints(folder):
        trainer = Trainer.load(folder, *given, **options)
    else:
        trainer = Trainer(*given, **options)
    with trainer:
        yield trainer, loader, scheduler


def _steps(trainer: Trainer, loader: Loader, scheduler: LRScheduler | None) -> Iterator[int]:
    """Train to the end of the epoch; yield the number of steps done after each step."""
    for batch in trainer.epoch(loader):
        trainer.step(*batch)
        if scheduler:
            scheduler.step()
        yield trainer.steps_done


def _announced(steps: Iterator[int], total: int, say: Say) -> Iterator[int]:
    """Pass on the numbers of steps done; say at intervals how long the training will take."""
    first, first_s = 0, 0.0
    said_s = time.perf_counter()
    for done in steps:
        now_s = time.perf_counter()
        if not first:
            first, first_s = done, now_s
        elif now_s - said_s > _SAY_EVERY_S:
            said_s = now_s
            left_s = round((total - done) * (now_s - first_s) / (done - first))
            say(f"step {done} of {total}, about {datetime.timedelta(seconds=left_s)} left")
        yield done


def _make_network(training: Training) -> nn.Module:
    """Return the network with its initial weights, which are the same each time."""
    torch.manual_seed(0)
    model = find_factory(training.network)()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            if training.init == "book":
                nn.init.normal_(layer.weight, std=0.01)
            elif training.init == "he":
                nn.init.kaiming_normal_(layer.weight)
    return model


def _make_scheduler(
    training: Training, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> LRScheduler | None:
    if training.base_batch_size is None:
        return None
    return scale_lr(
        optimizer,
        base_batch_size=training.base_batch_size,
        batch_size=training.batch_size,
        rule=training.rule,
        warmup_steps=training.warmup_epochs * steps_per_epoch,
        total_steps=training.epochs * steps_per_epoch if training.decays else None,
    )


def choose_devices(count: int) -> Devices:
    """Return `count` devices: the GPUs in turn, or CPU devices on a machine without GPUs."""
    gpus = try_all_gpus() if gpu_count() else ()
    return [gpus[number % len(gpus)] for number in range(count)] if gpus else count


def timeline(spans: list[Span], devices: list[str]) -> list[dict[str, Any]]:
    """Return the spans of the newest steps, in seconds since the first of these steps began.

    Each is {"device", "category", "name", "began_s", "ended_s"}.
    """
    steps = [span for span in spans if span.category == "step"][-_TIMELINE_STEPS:]
    if not steps:
        return []
    began_s, ended_s = steps[0].began_s, steps[-1].ended_s
    return [
        {
            "device": devices[span.row],
            "category": span.category,
            "name": span.name,
            "began_s": span.began_s - began_s,
            "ended_s": span.ended_s - began_s,
        }
        for span in spans
        if isinstance(span.row, int)
        and span.row < len(devices)
        and span.category in ("compute", "sum", "update")
        and began_s <= span.began_s <= ended_s
    ]


def _first(examples: TensorDataset, count: int | None) -> TensorDataset:
    return TensorDataset(*(tensor[:count] for tensor in examples.tensors))
