"""The loop of `evenstep train`: trains to the goal, saves, stops on a signal, tests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import click
from rich.console import Console

from evenstep import metrics
from evenstep.batch import Batch
from evenstep.callbacks import RunLog
from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.terminal.display import Display, open_display
from evenstep.cli.terminal.in_flight import StepsInFlight
from evenstep.cli.terminal.progress import Goal, Progress
from evenstep.cli.training.record import TrainRecord
from evenstep.cli.training.saver import Saver
from evenstep.cli.training.setup import train_batches
from evenstep.cli.training.stop import StopRequest
from evenstep.data import Loader
from evenstep.distributed import job_share, machine_count, was_launched
from evenstep.errors import ClosedError, NonFiniteLossError, SaveError
from evenstep.models.registry import blamed_on_model
from evenstep.training.trainer import Trainer

_ONE_SIGNAL_S = 3.0  # Ctrl-C reaches a process twice: from the terminal and from its launcher


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A training that is ready to begin or to resume; only the first process may have a `log`."""

    options: ExperimentOptions
    trainer: Trainer
    loader: Loader
    test: Loader
    goal: Goal
    saver: Saver
    in_flight: int
    log: RunLog | None = None


class StoppedError(click.ClickException):
    """A signal ended the training; the exit code is that of a shell, 130 for Ctrl-C."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number  # type: ignore[misc]


def train_and_test(training: Training, console: Console) -> TrainRecord:
    """Train to the goal, save and test. If training ends early, save what can be resumed."""
    progress, saver = Progress(training.goal), training.saver
    same_signal_s = _ONE_SIGNAL_S if was_launched() else 0.0
    display = open_display(console)
    stopping = StopRequest(display.say_stopping, same_signal_s=same_signal_s)
    with stopping as stop, training.trainer, display:
        try:
            _train(training, progress, display, stop)
            saver.save()
            accuracy = _test(training, progress, display, stop)
        except KeyboardInterrupt:
            saver.save()
            raise StoppedError(
                f"stopped after step {training.trainer.steps_done} of {training.goal.steps}; "
                f"{saver.summary()}",
                stop.number,
            ) from None
        except NonFiniteLossError as error:
            # Not saved: weights that are about to become NaN would displace good checkpoints.
            raise NonFiniteLossError(f"{error}; {saver.summary()}") from error
        except SaveError:
            raise
        except BaseException:
            with contextlib.suppress(ClosedError):  # between two steps: the error says so
                saver.save()
            raise
        return _record(training, progress, accuracy)


def _train(training: Training, progress: Progress, display: Display, stop: StopRequest) -> None:
    trainer, loader, goal = training.trainer, training.loader, training.goal
    batches = train_batches(trainer, loader)
    if trainer.steps_done >= goal.steps:
        display.say(f"step {trainer.steps_done} of {goal.steps}: nothing is left to train")
    elif trainer.experiment.compile:
        display.say_what_runs("compiling: the first step takes longer")
    steps = StepsInFlight(trainer, progress, display)
    while trainer.steps_done < goal.steps:
        if stop.requested:
            trainer.ask_to_stop()
        if trainer.should_stop:
            raise KeyboardInterrupt
        batch = next(batches)
        with blamed_on_model(training.options.model, lambda: f"in step {trainer.steps_done}"):
            examples = loader.size_of(trainer.steps_done % len(loader))
            steps.add(trainer.step(*batch), examples)
            ends = training.saver.is_due or trainer.steps_done == goal.steps
            steps.wait(down_to=0 if ends else training.in_flight - 1)
        if trainer.steps_done % len(loader) == 0:
            steps.wait()
            if trainer.steps_done < goal.steps:
                progress.test_accuracy = _measure(training, trainer.batches(training.test))
                display.show_epoch(progress)
            steps.restart_clock()
        if training.saver.is_due:
            training.saver.save(background=True)
            steps.restart_clock()


def _test(training: Training, progress: Progress, display: Display, stop: StopRequest) -> float:
    """Return the accuracy at the end of the training."""

    def stoppable() -> Iterator[Batch]:
        for batch in training.trainer.batches(training.test):
            stop.check()
            yield batch

    display.say_what_runs(f"testing on {training.test.examples} examples")
    progress.test_accuracy = _measure(training, stoppable())
    if progress.ends_epoch and progress.examples:
        display.show_epoch(progress)
    return progress.test_accuracy


def _measure(training: Training, batches: Iterator[Batch]) -> float:
    """Return the accuracy on the test examples, and log it."""
    with blamed_on_model(training.options.model, lambda: "while it was tested"):
        measured = training.trainer.evaluate(batches, {"accuracy": metrics.accuracy})
    if training.log is not None:
        training.trainer.waitall()  # its steps are logged first
        training.log.add(training.trainer.steps_done, measured)
    return float(measured["accuracy"])


def _record(training: Training, progress: Progress, accuracy: float) -> TrainRecord:
    trainer, options = training.trainer, training.options
    return TrainRecord(
        model=options.model,
        data=options.data,
        devices=training.goal.devices,
        shards=trainer.experiment.shards,
        batch_size=options.batch_size,
        epochs=progress.epoch,
        steps=progress.step,
        seed=trainer.experiment.seed,
        train_loss=progress.loss,
        test_accuracy=accuracy,
        seconds_per_epoch=progress.epoch_s,
        examples_per_second=progress.examples_per_s,
        fingerprint=trainer.fingerprint(),
        fingerprint_2=trainer.fingerprint(version=2),
        within_rounding=trainer.within_rounding,
        facts=trainer.facts,
        **processes_and_machines(),
    )


def processes_and_machines() -> dict[str, int]:
    """Return the numbers of processes and of machines that train together."""
    return {"processes": job_share()[1], "machines": machine_count()}
