"""A training on Fashion-MNIST that can be interrupted at any time and goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from evenstep.checkpoint.files import list_checkpoints
from evenstep.data import Loader
from evenstep.devices import Devices, gpu_count
from evenstep.experiment import Precision
from evenstep.files import write_file
from evenstep.lr_scaling import Rule, scale_lr
from evenstep.metrics import accuracy
from evenstep.models.registry import find_factory
from evenstep.profiling.trace import Span
from evenstep.training.trainer import Trainer

Init: TypeAlias = Literal["book", "torch", "he"]
Tell: TypeAlias = Callable[[str], object]
Data: TypeAlias = "tuple[TensorDataset, TensorDataset]"
"""Examples to train on, and to test with."""

_SAVE_EVERY_S = 60.0
_TELL_EVERY_S = 10.0
_TIMELINE_STEPS = 3
_TEST_BATCH = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A training: the book's, or one that shows what mends it.

    Attributes:
        network: name of a model.
        devices: on how many it is computed; no part of the result.
        batch_size: examples of a minibatch.
        lr: learning rate of SGD for `base_batch_size`.
        epochs: how many.
        shards: V.
        momentum: of SGD.
        init: of linear and convolutional weights: "book" draws them from N(0, 0.01²), "he" from
            N(0, 2 / inputs) (He et al., "Delving Deep into Rectifiers", 2015), "torch" leaves them.
        precision: "fp32" or "bf16".
        base_batch_size: what `lr` is for, when it is scaled for `batch_size`; None to leave it.
        warmup_epochs: over how many epochs the rate grows to the scaled one.
        decays: whether it falls to 0 from there to the end.
        rule: by which it is scaled, "linear" or "sqrt".
        examples: train on so many of the first ones only; None for all.
        test_examples: test with so many of the first ones only; None for all.
    """

    network: str
    devices: int
    batch_size: int
    lr: float
    epochs: int
    shards: int = 8
    momentum: float = 0.0
    init: Init = "torch"
    precision: Precision = "fp32"
    base_batch_size: int | None = None
    warmup_epochs: int = 0
    decays: bool = False
    rule: Rule = "linear"
    examples: int | None = None
    test_examples: int | None = None


def train(training: Training, data: Data, folder: Path, tell: Tell) -> dict[str, Any]:
    """Train to the end, from where `folder` has it, and return what there is to show.

    Args:
        training: what to do.
        data: on what.
        folder: of this training's checkpoints; what was interrupted goes on from there.
        tell: told lines of progress.

    Returns:
        "accuracies" and "seconds" of each epoch (seconds without evaluation), "fingerprint",
        "shares" (of the devices' time, in seconds), and "timeline": spans of some steps on the
        devices. Times are those of the last process that trained.
    """
    train_data, test_data = data
    loader = Loader(_first(train_data, training.examples), training.batch_size)
    test = Loader(_first(test_data, training.test_examples), _TEST_BATCH, shuffle=False)
    model = make_network(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)
    scheduler = make_scheduler(training, optimizer, len(loader))
    with make_trainer(training, model, optimizer, scheduler, folder) as trainer:
        curve = _Curve(folder / "curve.json", trainer)
        progress = _Progress(tell, training.epochs * len(loader))
        while (epoch := trainer.cursor.epoch) < training.epochs:
            began_s = time.perf_counter()
            for batch in trainer.epoch(loader):
                trainer.step(*batch)
                if scheduler:
                    scheduler.step()
                progress.step_done(trainer.steps_done)
                spent_s = time.perf_counter() - began_s
                if spent_s > _SAVE_EVERY_S and trainer.steps_done % len(loader):
                    curve.spent(trainer.steps_done, epoch, spent_s)
                    trainer.save(folder, keep=1)
                    began_s = time.perf_counter()
            curve.spent(trainer.steps_done, epoch, time.perf_counter() - began_s)
            reached = trainer.evaluate(test, {"accuracy": accuracy})["accuracy"]
            curve.reached(reached)
            trainer.save(folder, keep=1)
            tell(f"epoch {epoch + 1} of {training.epochs}: accuracy {reached:.4f}")
        return {
            **curve.values,
            "fingerprint": trainer.fingerprint(),
            "shares": {
                own.device: {**own.seconds, "shards": own.shards} for own in trainer.shares()
            },
            "timeline": timeline(trainer.trace.spans, [device.name for device in trainer.devices]),
        }


def first_steps(training: Training, data: Data, steps: int) -> dict[str, Any]:
    """Return the fingerprint after the training's first `steps` steps, and their seconds."""
    loader = Loader(_first(data[0], training.examples), training.batch_size)
    model = make_network(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr, momentum=training.momentum)
    scheduler = make_scheduler(training, optimizer, len(loader))
    with make_trainer(training, model, optimizer, scheduler, None) as trainer:
        began_s = time.perf_counter()
        for batch in trainer.epoch(loader):
            trainer.step(*batch)
            if scheduler:
                scheduler.step()
            if trainer.steps_done == steps:
                break
        seconds = time.perf_counter() - began_s
        return {"fingerprint": trainer.fingerprint(), "seconds": seconds, "steps": steps}


def make_network(training: Training) -> nn.Module:
    """Return the network with its first weights, which are the same each time."""
    torch.manual_seed(0)
    model = find_factory(training.network)()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            if training.init == "book":
                nn.init.normal_(layer.weight, std=0.01)
            elif training.init == "he":
                nn.init.kaiming_normal_(layer.weight)
    return model


def make_scheduler(
    training: Training, optimizer: torch.optim.Optimizer, steps_an_epoch: int
) -> LRScheduler | None:
    """Return what scales the rate for the batch; None where it stays as the book has it."""
    if training.base_batch_size is None:
        return None
    return scale_lr(
        optimizer,
        base_batch_size=training.base_batch_size,
        batch_size=training.batch_size,
        rule=training.rule,
        warmup_steps=training.warmup_epochs * steps_an_epoch,
        total_steps=training.epochs * steps_an_epoch if training.decays else None,
    )


def make_trainer(
    training: Training,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    folder: Path | None,
) -> Trainer:
    """Return a trainer, at the newest checkpoint in `folder` if there is one."""
    options: dict[str, Any] = {
        "devices": places(training.devices),
        "shards": training.shards,
        "precision": training.precision,
        "scheduler": scheduler,
    }
    given = (model, optimizer, nn.CrossEntropyLoss())
    if folder is not None and list_checkpoints(folder):
        return Trainer.load(folder, *given, **options)
    return Trainer(*given, **options)


def places(count: int) -> Devices:
    """Return `count` devices: GPUs, each as often as it takes, or CPU devices without GPUs."""
    gpus = gpu_count()
    return [f"cuda:{number % gpus}" for number in range(count)] if gpus else count


def timeline(spans: list[Span], devices: list[str]) -> list[dict[str, Any]]:
    """Return the newest steps' spans on the devices, with times from the first of them on.

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


class _Curve:
    """What is known of each epoch; written before each checkpoint.

    Args:
        file: where it is kept between processes.
        trainer: at the checkpoint that training goes on from. What was written for a later one,
            which never came to be, is forgotten.
    """

    def __init__(self, file: Path, trainer: Trainer) -> None:
        self._file = file
        self._pieces: list[tuple[int, int, float]] = []  # steps done, epoch, seconds
        self._accuracies: list[float] = []
        with contextlib.suppress(OSError, json.JSONDecodeError):
            found = json.loads(file.read_text())
            self._pieces = [piece for piece in found["pieces"] if piece[0] <= trainer.steps_done]
            self._accuracies = found["accuracies"][: trainer.cursor.epoch]

    @property
    def values(self) -> dict[str, list[float]]:
        """The accuracy after each epoch, and its seconds without evaluation."""
        seconds = [0.0] * len(self._accuracies)
        for _, epoch, spent in self._pieces:
            seconds[epoch] += spent
        return {"accuracies": self._accuracies, "seconds": seconds}

    def spent(self, steps_done: int, epoch: int, seconds: float) -> None:
        """Add to an epoch's seconds."""
        self._pieces.append((steps_done, epoch, seconds))
        self._write()

    def reached(self, accuracy: float) -> None:
        """Note the next epoch's accuracy."""
        self._accuracies.append(accuracy)
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        document = {"pieces": self._pieces, "accuracies": self._accuracies}
        write_file(self._file, json.dumps(document))


class _Progress:
    """Tells now and then how far a training is, and how long it will take."""

    def __init__(self, tell: Tell, steps: int) -> None:
        self._tell = tell
        self._steps = steps
        self._told_s = time.perf_counter()
        self._first: tuple[int, float] | None = None

    def step_done(self, done: int) -> None:
        """Note a step."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (done, now)
        elif now - self._told_s > _TELL_EVERY_S:
            self._told_s = now
            before, then = self._first
            left_s = (self._steps - done) * (now - then) / (done - before)
            self._tell(f"step {done} of {self._steps}, about {spelled(left_s)} left")


def spelled(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{math.ceil(seconds / 60)} min"


def _first(examples: TensorDataset, count: int | None) -> TensorDataset:
    if count is None or count >= len(examples):
        return examples
    return TensorDataset(*(tensor[:count] for tensor in examples.tensors))
