"""`evenstep train`: trains a model, shows progress, saves, tests, and records the results."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import click
from rich.console import Console

from evenstep.callbacks import RunLog
from evenstep.checkpoint.files import latest_checkpoint, list_checkpoints
from evenstep.cli.options.training import ExperimentOptions, LayoutOptions
from evenstep.cli.processes.launch import launch
from evenstep.cli.processes.report import report_shares
from evenstep.cli.terminal.files import own_stdout, target_of, write_text
from evenstep.cli.terminal.loading import loading
from evenstep.cli.terminal.output import fields_table, print_line, print_table, shares_table
from evenstep.cli.terminal.progress import Goal
from evenstep.cli.training.image_format import time_image_formats
from evenstep.cli.training.loop import Training, processes_and_machines, train_and_test
from evenstep.cli.training.notes import notes_on_stderr
from evenstep.cli.training.record import TrainRecord
from evenstep.cli.training.runfile import resumed_options, write_run_file
from evenstep.cli.training.saver import Saver
from evenstep.cli.training.setup import (
    layout_arguments,
    load_data,
    load_newest_whole,
    load_trainer,
    make_loader,
    make_trainer,
)
from evenstep.data import Loader
from evenstep.devices import intra_op_threads
from evenstep.devices.discovery import WITHIN_ROUNDING
from evenstep.distributed import is_first, read_secret, restarts, was_launched
from evenstep.distributed.secret import SECRET_FILE
from evenstep.errors import CheckpointError, InputError, SaveError
from evenstep.models.registry import find_factory
from evenstep.planning import facts_of
from evenstep.profiling.accounting import DeviceShares
from evenstep.training.trainer import Trainer

_DEFAULT_EPOCHS = {"digits": 30, "fashion-mnist": 10}


def train(experiment: ExperimentOptions, layout: LayoutOptions) -> None:
    """Train, and print the results."""
    _check_what_belongs_together(layout)
    if layout.secret_file is not None:
        read_secret(layout.secret_file)
        os.environ[SECRET_FILE] = str(layout.secret_file.absolute())
    if layout.processes > 1 and not was_launched():
        shares = launch(layout.processes, layout.max_restarts, sys.argv[1:])
        _print_shares(Console(stderr=layout.json_file == "-"), shares)
    elif layout.json_file == "-":
        with own_stdout() as file:
            _train_here(experiment, layout, file)
    else:
        _train_here(experiment, layout, sys.stdout)


def _train_here(experiment: ExperimentOptions, layout: LayoutOptions, stdout: TextIO) -> None:
    """Train in this process, perhaps one of several."""
    if not is_first():  # only the first process prints and writes files
        layout = dataclasses.replace(layout, trace_file=None, json_file=None)
    console = Console(stderr=layout.json_file == "-", quiet=not is_first())
    # This thread only fetches data: more threads would compete with the devices for the cores.
    with notes_on_stderr(), intra_op_threads(1):
        training = _prepare(experiment, layout)
        try:
            record = train_and_test(training, console)
        finally:
            if layout.trace_file is not None:
                trace = training.trainer.trace
                trace.facts["training"] = facts_of(
                    training.trainer.model.parameters(),
                    training.trainer.optimizer,
                    training.options.batch_size,
                    shards=training.trainer.experiment.shards,
                    **processes_and_machines(),
                )
                trace.save(target_of(layout.trace_file))
    print_table(console, fields_table(_fields(record, layout.checkpoint_dir)))
    shares = [] if record.train_loss is None else [*training.trainer.shares()]
    if not report_shares(shares):
        _print_shares(console, shares)
    _write_json(record, layout.json_file, stdout)
    if layout.trace_file is not None and not was_launched():
        _add_image_formats(training, layout.trace_file)


def _add_image_formats(training: Training, trace_file: str) -> None:
    """Add to the trace what channels-last images would bring."""
    trace, batch = training.trainer.trace, next(iter(training.loader))
    factory = find_factory(training.options.model)
    device = training.goal.devices[0]
    if times := time_image_formats(training.options, factory, batch, device):
        trace.facts["image_formats_ms"] = times
        trace.save(target_of(trace_file))


def _print_shares(console: Console, shares: Sequence[DeviceShares]) -> None:
    if shares:
        print_line(console, "")
        print_table(console, shares_table(shares))


def _check_what_belongs_together(layout: LayoutOptions) -> None:
    given = {
        "--resume": layout.resume,
        "--auto-resume": layout.auto_resume,
        "--checkpoint-every": layout.checkpoint_every,
    }
    for flag in (flag for flag, value in given.items() if value):
        if layout.checkpoint_dir is None:
            raise InputError(f"got {flag} without --checkpoint-dir: add --checkpoint-dir DIR")
    if layout.max_restarts and layout.processes == 1 and not was_launched():
        raise InputError("got --max-restarts without --processes: add --processes NUMBER")


def _prepare(experiment: ExperimentOptions, layout: LayoutOptions) -> Training:
    """Build everything that the training needs, and only then create its folder."""
    folder, restarted = layout.checkpoint_dir, layout.auto_resume or restarts() > 0
    resumed_from = _resumed_folder(layout, restarted=restarted)
    if resumed_from:
        experiment = resumed_options(resumed_from, experiment)
    factory = find_factory(experiment.model)
    with loading(experiment.data):
        examples, test_examples = (
            load_data(experiment.data, experiment.data_dir, train=train) for train in (True, False)
        )
    log = None
    if layout.log_dir is not None and is_first():
        log = RunLog(layout.log_dir, overwrite=restarted)
    arguments = layout_arguments(layout)
    arguments["callbacks"] = [] if log is None else [log]
    if resumed_from:
        load = load_newest_whole if restarted else load_trainer
        trainer = load(experiment, factory, resumed_from, **arguments)
    else:
        trainer = make_trainer(experiment, factory, **arguments)
    if folder and is_first():
        write_run_file(folder, experiment)
    loader = make_loader(experiment, examples, trainer.experiment.seed)
    return Training(
        options=experiment,
        trainer=trainer,
        loader=loader,
        test=Loader(test_examples, experiment.batch_size, shuffle=False),
        goal=_goal(experiment, trainer, loader),
        saver=Saver(
            trainer,
            folder,
            layout.checkpoint_every or len(loader),
            has_owners=layout.owners,
        ),
        in_flight=layout.in_flight,
        log=log,
    )


def _resumed_folder(layout: LayoutOptions, *, restarted: bool) -> Path | None:
    """Return the folder to resume from; None to start.

    Raises:
        CheckpointError: the folder has checkpoints, but --resume was not given; or the reverse.
    """
    folder = layout.checkpoint_dir
    if folder is None:
        return None
    checkpoints = list_checkpoints(folder)
    if layout.resume or (restarted and checkpoints):
        latest_checkpoint(folder)  # raises if there is none
        return folder
    if checkpoints:
        raise CheckpointError(
            f"{folder} already has checkpoints of a training (the newest is "
            f"{checkpoints[-1].name}): add --resume, or choose a different --checkpoint-dir"
        )
    return None


def _goal(experiment: ExperimentOptions, trainer: Trainer, loader: Loader) -> Goal:
    default = _DEFAULT_EPOCHS[experiment.data] * len(loader)
    return Goal(
        first_step=trainer.steps_done,
        steps=experiment.target_steps(len(loader), default=default),
        epoch_steps=len(loader),
        epoch_examples=loader.epoch_examples,
        devices=tuple(device.name for device in trainer.devices),
    )


def _fields(record: TrainRecord, folder: Path | None) -> list[tuple[str, str]]:
    def spell(value: float | None, spec: str) -> str:
        return "- (no step was trained)" if value is None else format(value, spec)

    return [
        ("test accuracy", f"{record.test_accuracy:.4f}"),
        ("train loss", spell(record.train_loss, ".4f")),
        ("seconds/epoch", spell(record.seconds_per_epoch, ",.2f")),
        ("examples/s", spell(record.examples_per_second, ",.0f")),
        ("devices", ", ".join(record.devices)),
        ("shards", str(record.shards)),
        *([] if folder is None else [("checkpoints", str(folder))]),
        ("fingerprint", record.fingerprint),
        *([("bits", WITHIN_ROUNDING)] if record.within_rounding else []),
    ]


def _write_json(record: TrainRecord, name: str | None, stdout: TextIO) -> None:
    if name == "-":
        click.echo(record.to_json(), file=stdout)
    elif name is not None:
        try:
            write_text(name, record.to_json() + "\n")
        except OSError as error:
            raise SaveError(
                f"{name} could not be written ({error.strerror or error}): "
                f"the record is {record.to_json()}"
            ) from error
