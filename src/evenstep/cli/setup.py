"""From a run's choices to its data, model, optimizer and trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.batch import Batch
from evenstep.checkpoint.files import list_checkpoints
from evenstep.cli.options import Choices
from evenstep.data import Loader, digits, fashion_mnist
from evenstep.devices import Devices
from evenstep.errors import CheckpointError, DataError, ModelError
from evenstep.training.trainer import Trainer

_PINNED = ("shards", "seed", "precision", "memory_format", "threads", "hybridize", "batch_norm")
"""The choices that a checkpoint pins by itself: left alone at a resume, they are its own."""


def load_data(data: str, data_dir: str | None, *, train: bool) -> TensorDataset:
    """Return the examples to train on, or those to test with."""
    if data == "digits":
        if data_dir is not None:
            raise DataError(
                "got --data-dir, but the digits come with scikit-learn: "
                "leave it out, or say --data fashion-mnist"
            )
        return digits(train)
    return fashion_mnist(train, data_dir, progress=sys.stderr.isatty())


def make_loader(choices: Choices, examples: TensorDataset, seed: int) -> Loader:
    """Return the batches to train on."""
    return Loader(examples, choices.batch_size, seed=seed, drop_last=choices.drop_last)


def make_trainer(
    choices: Choices, devices: Devices, factory: Callable[[], nn.Module], **places: Any
) -> Trainer:
    """Build model, optimizer and trainer afresh; the weights are a function of the seed.

    `places` are further options of the trainer that don't move its result.
    """
    torch.manual_seed(choices.seed)
    model = factory()
    pinned = {name: getattr(choices, name) for name in _PINNED}
    optimizer = _optimizer(model, choices)
    return Trainer(model, optimizer, _loss(), devices=devices, **places, **pinned)


def load_trainer(
    choices: Choices,
    devices: Devices,
    factory: Callable[[], nn.Module],
    folder: Path,
    **places: Any,
) -> Trainer:
    """Build a trainer that goes on from the newest checkpoint in `folder`.

    Raises:
        CheckpointError: none is there, it is damaged, or an option that stood on the command line
            asks for another experiment.
    """
    model = factory()
    asked: dict[str, Any] = {
        name: getattr(choices, name) for name in _PINNED if name in choices.given
    }
    optimizer = _optimizer(model, choices)
    return Trainer.load(folder, model, optimizer, _loss(), devices=devices, **places, **asked)


def load_newest_whole(
    choices: Choices,
    devices: Devices,
    factory: Callable[[], nn.Module],
    folder: Path,
    **places: Any,
) -> Trainer:
    """Build a trainer that goes on from the newest checkpoint that is whole; tell of the others.

    Raises:
        CheckpointError: none is.
    """

    def load(checkpoints: Sequence[Path]) -> Trainer:
        *earlier, newest = checkpoints
        try:
            return load_trainer(choices, devices, factory, newest, **places)
        except CheckpointError as error:
            if not earlier:
                raise
            click.echo(f"note: {error}", err=True)
        return load(earlier)

    return load(list_checkpoints(folder))


def train_batches(trainer: Trainer, loader: Loader) -> Iterator[Batch]:
    """Yield the batches from the trainer's place in the data on, epoch after epoch, endlessly."""
    while True:
        yield from trainer.epoch(loader)


def _optimizer(model: nn.Module, choices: Choices) -> torch.optim.Optimizer:
    if not any(True for _ in model.parameters()):
        raise ModelError(f"the model {choices.model} has no parameters: there is nothing to train")
    return torch.optim.SGD(model.parameters(), lr=choices.lr, momentum=choices.momentum)


def _loss() -> nn.Module:
    return nn.CrossEntropyLoss()
