"""`evenstep train`: train, show it, save it, test it, record it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from evenstep import metrics
from evenstep.batch import Batch
from evenstep.checkpoint.files import latest_checkpoint, list_checkpoints
from evenstep.cli.display import Display, open_display, print_line, print_table
from evenstep.cli.files import check_file, target_of, write_text
from evenstep.cli.landing import Landing
from evenstep.cli.launch import launch
from evenstep.cli.notes import notes_on_stderr
from evenstep.cli.options import Choices, takes_choices
from evenstep.cli.progress import Goal, Progress
from evenstep.cli.record import TrainRecord
from evenstep.cli.runfile import resumed_choices, write_choices
from evenstep.cli.saver import Saver
from evenstep.cli.setup import (
    load_data,
    load_newest_whole,
    load_trainer,
    make_loader,
    make_trainer,
    train_batches,
)
from evenstep.cli.shares import print_shares
from evenstep.cli.stop import StopRequest
from evenstep.data import Loader
from evenstep.devices import intra_op_threads
from evenstep.distributed import is_first, restarts, was_launched
from evenstep.errors import CheckpointError, InputError, NonFiniteLossError, SaveError
from evenstep.models.registry import blamed_on_model, find_factory
from evenstep.training.trainer import Trainer

_ONE_SIGNAL_S = 3.0  # Ctrl-C reaches a process from the terminal and from its launcher
_DEFAULT_EPOCHS = {"digits": 40, "fashion-mnist": 10}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run that is ready to begin."""

    choices: Choices
    trainer: Trainer
    loader: Loader
    test: Loader
    goal: Goal
    saver: Saver
    in_flight: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """What moves a run's time and not its result: its devices, how many steps at once, patience."""

    devices: str
    in_flight: int
    timeout_s: float

    @property
    def options(self) -> dict[str, Any]:
        """The options of a trainer for them, besides the devices."""
        return {"max_in_flight": self.in_flight, "peer_timeout_s": self.timeout_s}


@click.command()
@takes_choices
@click.option(
    "--devices",
    default="auto",
    show_default=True,
    metavar="auto|N|LIST",
    help="All GPUs, else a CPU device for each core; a number of devices; or names: cpu:0,cpu:1.",
)
@click.option(
    "--checkpoint-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Save here: after every epoch, at the end, and when the run is stopped.",
)
@click.option(
    "--checkpoint-every",
    metavar="STEPS",
    type=click.IntRange(min=1),
    help="Save after so many steps instead of after every epoch.",
)
@click.option(
    "--in-flight",
    metavar="STEPS",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Steps at once: with 2 the next batch is loaded and copied while a step is computed.",
)
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    help="Write what ran where and when, for evenstep explain, Perfetto and chrome://tracing.",
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --processes: start them again so often, from the last checkpoint, if one fails.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes on this machine, each with --devices of its own (torchrun starts more).",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long a process waits for another one before it says who is late, and ends.",
)
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in DIR.")
@click.option(
    "--auto-resume",
    is_flag=True,
    help="Go on from the newest whole checkpoint in DIR if there is one, else begin: for jobs that "
    "a cluster starts again.",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Write the record of the run here; - for stdout, which then holds nothing else.",
)
def train(
    choices: Choices,
    devices: str,
    checkpoint_dir: Path | None,
    checkpoint_every: int | None,
    in_flight: int,
    trace_file: str | None,
    processes: int,
    max_restarts: int,
    timeout_s: float,
    resume: bool,
    auto_resume: bool,
    json_file: str | None,
) -> None:
    """Train a model; the result is the same on any number of devices.

    Without --epochs and --steps it trains 40 epochs of the digits, 10 of fashion-mnist. A resumed
    run has the options of the run that it goes on with; only its devices and its length may be
    others.
    """
    if checkpoint_dir is None and (resume or auto_resume or checkpoint_every):
        resuming = "--resume" if resume else "--auto-resume"
        option = resuming if resume or auto_resume else "--checkpoint-every"
        raise InputError(f"got {option} without --checkpoint-dir: say in which folder")
    check_file("--json", json_file, may_be_stream=True)
    check_file("--trace", trace_file)
    if processes > 1 and not was_launched():
        launch(processes, max_restarts, sys.argv[1:])
    started_again = auto_resume or restarts() > 0
    if started_again and checkpoint_dir is not None:
        resume = resume or bool(list_checkpoints(checkpoint_dir))
    if not is_first():  # of several processes one speaks and writes
        trace_file = json_file = None
    console = Console(stderr=json_file == "-", quiet=not is_first())
    # This thread only fetches data: threads of its own would fight with the devices for the cores.
    with notes_on_stderr(), intra_op_threads(1):
        places = Places(devices=devices, in_flight=in_flight, timeout_s=timeout_s)
        load = load_newest_whole if started_again else load_trainer
        run = _prepare(choices, places, checkpoint_dir, load if resume else None, checkpoint_every)
        try:
            record = _train_and_test(run, console)
        finally:
            if trace_file is not None:
                run.trainer.trace.save(target_of(trace_file))
    print_table(console, _table(record, checkpoint_dir))
    if record.train_loss is not None:
        print_line(console, "")
        print_shares(console, run.trainer.shares())
    _write_json(record, json_file)


def _prepare(
    choices: Choices,
    places: Places,
    folder: Path | None,
    load: Callable[..., Trainer] | None,
    every: int | None,
) -> Run:
    """Build everything that the run needs; only then its folder is made.

    `load` makes the trainer that goes on from a checkpoint; None to begin.
    """
    if folder is not None and load:
        latest_checkpoint(folder)  # raises where there is none
        choices = resumed_choices(folder, choices)
    elif folder is not None:
        _refuse_used(folder)
    factory = find_factory(choices.model)
    examples = load_data(choices.data, choices.data_dir, train=True)
    test = Loader(
        load_data(choices.data, choices.data_dir, train=False), choices.batch_size, shuffle=False
    )
    if folder is not None and load:
        trainer = load(choices, places.devices, factory, folder, **places.options)
    else:
        trainer = make_trainer(choices, places.devices, factory, **places.options)
    if folder is not None and is_first():
        write_choices(folder, choices)
    loader = make_loader(choices, examples, trainer.experiment.seed)
    default = _DEFAULT_EPOCHS[choices.data] * len(loader)
    goal = Goal(
        first_step=trainer.steps_done,
        steps=choices.target_steps(len(loader), default=default),
        epoch_steps=len(loader),
        epoch_examples=loader.epoch_examples,
        devices=tuple(device.name for device in trainer.devices),
    )
    return Run(
        choices=choices,
        trainer=trainer,
        loader=loader,
        test=test,
        goal=goal,
        saver=Saver(trainer, folder, every or len(loader)),
        in_flight=places.in_flight,
    )


def _train_and_test(run: Run, console: Console) -> TrainRecord:
    """Train to the goal and test; whatever ends the training, save what is worth it."""
    progress = Progress(run.goal)
    together_s = _ONE_SIGNAL_S if was_launched() else 0.0
    with StopRequest(together_s) as stop, run.trainer, open_display(console) as display:
        try:
            _train(run, progress, display, stop)
            run.saver.save()
            accuracy = _test(run, display, stop)
        except KeyboardInterrupt:
            run.saver.save()
            raise click.ClickException(
                f"stopped after step {run.trainer.steps_done} of {run.goal.steps}; "
                f"{run.saver.story()}"
            ) from None
        except NonFiniteLossError as error:
            # Not saved: weights on the verge of NaN would push out checkpoints from better days.
            raise NonFiniteLossError(f"{error}; {run.saver.story()}") from error
        except SaveError:
            raise
        except BaseException:
            run.saver.save()
            raise
    return _record(run, progress, accuracy)


def _train(run: Run, progress: Progress, display: Display, stop: StopRequest) -> None:
    trainer = run.trainer
    batches = train_batches(trainer, run.loader)
    if trainer.steps_done >= run.goal.steps:
        display.say(f"step {trainer.steps_done} of {run.goal.steps}: nothing is left to train")
    landing = Landing(trainer, progress, display)
    while trainer.steps_done < run.goal.steps:
        if stop.asked:
            trainer.ask_to_stop()
        if trainer.shall_stop:
            raise KeyboardInterrupt
        batch = next(batches)
        with blamed_on_model(run.choices.model, lambda: f"in step {trainer.steps_done}"):
            examples = run.loader.size_of(trainer.steps_done % len(run.loader))
            landing.expect(trainer.step(*batch), examples)
            ends = run.saver.is_due or trainer.steps_done == run.goal.steps
            landing.wait(down_to=0 if ends else run.in_flight - 1)
        if run.saver.is_due:
            run.saver.save(aside=True)
            landing.leave_out()


def _test(run: Run, display: Display, stop: StopRequest) -> float:
    def stoppable() -> Iterator[Batch]:
        for batch in run.trainer.batches(run.test):
            stop.check()
            yield batch

    display.say(f"testing on {run.test.examples} examples")
    with blamed_on_model(run.choices.model, lambda: "while it was tested"):
        measured = run.trainer.evaluate(stoppable(), {"accuracy": metrics.accuracy})
    return measured["accuracy"]


def _record(run: Run, progress: Progress, accuracy: float) -> TrainRecord:
    return TrainRecord(
        model=run.choices.model,
        data=run.choices.data,
        devices=run.goal.devices,
        shards=run.trainer.experiment.shards,
        batch_size=run.choices.batch_size,
        epochs=progress.epoch,
        steps=progress.step,
        seed=run.trainer.experiment.seed,
        train_loss=progress.loss,
        test_accuracy=accuracy,
        seconds_per_epoch=progress.epoch_s,
        examples_per_second=progress.examples_per_s,
        fingerprint=run.trainer.fingerprint(),
    )


def _table(record: TrainRecord, folder: Path | None) -> list[tuple[str, str]]:
    def spell(value: float | None, spec: str) -> str:
        return "- (no step was trained)" if value is None else format(value, spec)

    rows = [
        ("test accuracy", f"{record.test_accuracy:.4f}"),
        ("train loss", spell(record.train_loss, ".4f")),
        ("seconds/epoch", spell(record.seconds_per_epoch, ",.2f")),
        ("examples/s", spell(record.examples_per_second, ",.0f")),
        ("devices", ", ".join(record.devices)),
        ("shards", str(record.shards)),
    ]
    checkpoint = [] if folder is None else [("checkpoints", str(folder))]
    return [*rows, *checkpoint, ("fingerprint", record.fingerprint)]


def _refuse_used(folder: Path) -> None:
    used = list_checkpoints(folder)
    if used:
        raise CheckpointError(
            f"{folder} has checkpoints of a run already (the newest is {used[-1].name}): "
            f"go on from it with --resume, or give another --checkpoint-dir"
        )


def _write_json(record: TrainRecord, name: str | None) -> None:
    if name == "-":
        click.echo(record.to_json())
    elif name is not None:
        try:
            write_text(name, record.to_json() + "\n")
        except OSError as error:
            raise SaveError(
                f"{name} could not be written ({error.strerror or error}): "
                f"the record is {record.to_json()}"
            ) from error
