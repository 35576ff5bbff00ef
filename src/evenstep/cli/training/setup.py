"""Builds data, model, optimizer and trainer from the options of a command."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.arithmetic import within
from evenstep.batch import Batch
from evenstep.checkpoint.files import list_checkpoints
from evenstep.checkpoint.training_state import read_experiment
from evenstep.cli.options.training import ExperimentOptions, LayoutOptions
from evenstep.data import Loader, digits, fashion_mnist
from evenstep.errors import CheckpointError, DataError, InputError, ModelError
from evenstep.options import Experiment, Faults, Layout, Owners, Stages
from evenstep.training.setup.arguments import TrainerOptions
from evenstep.training.trainer import Trainer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Factory: TypeAlias = Callable[[], nn.Module]


def load_data(data: str, data_dir: str | None, *, train: bool) -> TensorDataset:
    """Return the training examples, or the test examples."""
    if data == "fashion-mnist":
        return fashion_mnist(train, data_dir, progress=sys.stderr.isatty())
    if data_dir is not None:
        raise DataError(
            "got --data-dir, but the digits come with evenstep: "
            "leave it out, or use --data fashion-mnist"
        )
    return digits(train)


def make_loader(options: ExperimentOptions, examples: TensorDataset, seed: int) -> Loader:
    """Return the training batches."""
    loader = Loader(examples, options.batch_size, seed=seed, drop_last=options.drop_last)
    if not len(loader):
        raise InputError(
            f"got --drop-last and --batch-size {options.batch_size}, but there are "
            f"{len(examples)} examples, so no batch is left: use a smaller --batch-size"
        )
    return loader


def layout_arguments(options: LayoutOptions) -> TrainerOptions:
    """Return the arguments of the trainer that don't affect its result."""
    given = options.trainer_arguments()
    divide: list[Stages | Owners] = []
    if given["stages"] is not None:
        divide.append(Stages(given["stages"]))
    if given["owners"]:
        divide.append(Owners())
    return {
        "devices": given["devices"],
        "max_in_flight": given["max_in_flight"],
        "layout": Layout(divide=tuple(divide)),
        "faults": Faults(
            peer_timeout_s=given["peer_timeout_s"], allow_rounding=given["allow_rounding"]
        ),
    }


def make_trainer(
    options: ExperimentOptions, factory: Factory, **layout: Unpack[TrainerOptions]
) -> Trainer:
    """Return a new trainer; its weights are a function of the seed.

    Args:
        options: the experiment.
        factory: builds the model.
        layout: further arguments of the trainer, which don't affect its result.
    """
    experiment = layout["experiment"] = Experiment(**options.trainer_arguments())
    model = seeded_model(factory, experiment)
    return Trainer(model, _optimizer(options, model), nn.CrossEntropyLoss(), **layout)


def seeded_model(factory: Factory, experiment: Experiment) -> nn.Module:
    """Return a new model; all that it draws is a function of the experiment's seed.

    A model that is loaded needs this too: a checkpoint lacks what is neither a parameter nor a
    buffer, such as a random projection in a plain attribute.
    """
    torch.manual_seed(experiment.seed)
    random.seed(experiment.seed)
    np.random.seed([experiment.seed >> 32, experiment.seed & 0xFFFFFFFF])
    with within(experiment.arithmetic)():
        return factory()


def load_trainer(
    options: ExperimentOptions, factory: Factory, folder: Path, **layout: Unpack[TrainerOptions]
) -> Trainer:
    """Return a trainer that resumes from `folder`: a checkpoint, or the newest one in it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or an option on the command line
            asks for a different experiment.
    """
    model = seeded_model(factory, read_experiment(folder))
    layout["experiment"] = Experiment(**options.trainer_arguments(given_only=True))
    optimizer = _optimizer(options, model)
    return Trainer.load(folder, model, optimizer, nn.CrossEntropyLoss(), **layout)


def load_newest_whole(
    options: ExperimentOptions, factory: Factory, folder: Path, **layout: Unpack[TrainerOptions]
) -> Trainer:
    """Return a trainer that resumes from the newest checkpoint that can be loaded.

    A note on stderr names each checkpoint that can't.

    Raises:
        CheckpointError: none can be loaded.
    """
    *earlier, newest = list_checkpoints(folder)
    while True:
        try:
            return load_trainer(options, factory, newest, **layout)
        except CheckpointError as error:
            if not earlier:
                raise
            click.echo(f"note: {error}", err=True)
        newest = earlier.pop()


def train_batches(trainer: Trainer, loader: Loader) -> Iterator[Batch]:
    """Yield batches without end, starting at the trainer's place in the data."""
    while True:
        yield from trainer.epoch(loader)


def _optimizer(options: ExperimentOptions, model: nn.Module) -> torch.optim.Optimizer:
    if not any(True for _ in model.parameters()):
        raise ModelError(f"the model {options.model} has no parameters: there is nothing to train")
    return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
