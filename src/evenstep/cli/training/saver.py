"""Decides when a training saves checkpoints, and says how it can be resumed."""

from __future__ import annotations

import shlex
from pathlib import Path

from evenstep.training.trainer import Trainer


class Saver:
    """Saves a trainer into a folder of checkpoints, each step at most once.

    Args:
        trainer: a new one, or one that was loaded from `folder`.
        folder: where checkpoints are saved; None saves nothing.
        every: number of steps between checkpoints.
        has_owners: whether the optimizer's state is split, so that it can't be copied at once.
    """

    def __init__(
        self, trainer: Trainer, folder: Path | None, every: int, *, has_owners: bool
    ) -> None:
        self._trainer = trainer
        self._folder = folder
        self._every = every
        self._has_owners = has_owners
        self._saved_step = trainer.steps_done

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due after the last step."""
        return self._trainer.steps_done % self._every == 0

    def save(self, *, background: bool = False) -> None:
        """Save, unless there is no folder or this step has been saved.

        With `background` the checkpoint is written while training continues, unless the optimizer's
        state has owners; otherwise it is on disk when `save` returns.
        """
        background = background and not self._has_owners
        if self._folder is not None and self._saved_step != self._trainer.steps_done:
            self._trainer.save(self._folder, background=background)
            self._saved_step = self._trainer.steps_done
        if not background:
            self._trainer.wait_for_save()

    def summary(self) -> str:
        """Wait for the disk, then say what is saved and how to resume."""
        self._trainer.wait_for_save()
        if self._folder is None:
            return "nothing is saved (use --checkpoint-dir to save)"
        if self._saved_step == 0:
            return "no checkpoint was written"
        return (
            f"{self._folder} has the checkpoint of step {self._saved_step}: resume with "
            f"evenstep train --resume --checkpoint-dir {shlex.quote(str(self._folder))}"
        )
