"""The interface of callbacks: a method for each event of a training, and its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step that has ended.

    Attributes:
        step: the steps since the start of the training, with this one: `trainer.steps_done`.
        epoch: its epoch, counted from 0.
        loss: the batch's mean loss, computed before the update.
        outputs: what `step(...).outputs` holds.
        lrs: the learning rate of each group of the optimizer, as it was when the step was
            submitted.
        examples: the examples in the batch, over all processes.
        seconds: the time from the end of the step before to the end of this one, with the wait for
            its data. Evaluating, saving and other work between steps is not part of it.
        busy: for each device of this process, the share of `seconds` in which it had work.
    """

    step: int
    epoch: int
    loss: float
    outputs: Mapping[str, Any]
    lrs: tuple[float, ...]
    examples: int
    seconds: float
    busy: Mapping[str, float]

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer's first group."""
        return self.lrs[0]

    @property
    def examples_per_s(self) -> float:
        """The examples a second."""
        return self.examples / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochStart:
    """A loop over `trainer.epoch` that begins.

    Attributes:
        epoch: the epoch's number, counted from 0.
        step: the number of steps since the start of the training.
        first: the number of the loop's first batch in the epoch: 0, unless a resume or a `break`
            left off in the middle.
        steps: the number of batches in the whole epoch; None if the loader has no length.
    """

    epoch: int
    step: int
    first: int
    steps: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """An epoch of `trainer.epoch` that has ended.

    Attributes:
        epoch: its number, counted from 0.
        step: the number of steps since the start of the training, at the end of the epoch.
        steps: the number of steps in the epoch. After a resume in the middle of an epoch, this and
            the following attributes count only the steps since then.
        examples: the examples in these steps.
        loss: the mean loss over these examples; None without a step.
        seconds: the sum of the steps' `seconds`.
    """

    epoch: int
    step: int
    steps: int
    examples: int
    loss: float | None
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveRecord:
    """A checkpoint that is whole on the disk.

    Attributes:
        step: the steps done when the state was taken.
        path: its folder.
    """

    step: int
    path: Path


class Callback:
    """Called by a trainer during a training: derive from it, and override what you need.

        class Report(evenstep.callbacks.Callback):
            def on_step(self, record):
                wandb.log({"loss": record.loss, "lr": record.lr}, step=record.step)

    All methods run in the thread that calls the trainer, between steps, in the order of the steps.
    With steps in flight `on_step` runs when a later call finds the step ended: nothing waits for
    it. Steps that were not taken are not reported. A method may read the model, and may evaluate
    and save if it runs in every process. If it raises, the error leaves the trainer's method that
    called it; the step, or the checkpoint, is complete by then.

    Attributes:
        every_process: whether it is called in each of several processes. By default only the first
            one calls it.
        grad_norm: whether to put the norm of the mean gradient into `record.outputs["grad_norm"]`,
            as `clip_norm=` does. Steps of `trainer.backward` have none.
    """

    every_process: bool = False
    grad_norm: bool = False

    def open(self, step: int) -> None:
        """Called when the trainer is opened, after `step` steps (0 for a new training)."""

    def on_step(self, record: StepRecord) -> None:
        """Called after every step, including those of `trainer.backward`."""

    def on_epoch_start(self, start: EpochStart) -> None:
        """Called when a loop over `trainer.epoch` begins, after the steps before it."""

    def on_epoch(self, record: EpochRecord) -> None:
        """Called when a loop over `trainer.epoch` reaches its end, after the epoch's last step."""

    def on_save(self, record: SaveRecord) -> None:
        """Called when a checkpoint has been written completely."""

    def close(self) -> None:
        """Called when the trainer is closed, also after an error."""
