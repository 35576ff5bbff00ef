"""When a run saves, and what it tells about that."""

from __future__ import annotations

import shlex
from pathlib import Path

from evenstep.training.trainer import Trainer


class Saver:
    """Saves a trainer into the run's folder, if it has one, and only what isn't saved yet."""

    def __init__(self, trainer: Trainer, folder: Path | None, every: int) -> None:
        """Begin with nothing to save.

        Args:
            trainer: fresh, or as it was loaded from `folder`.
            folder: where checkpoints go; None for a run that doesn't save.
            every: steps between two checkpoints.
        """
        self._trainer = trainer
        self._folder = folder
        self._every = every
        self._saved_step = trainer.steps_done

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._trainer.steps_done % self._every == 0

    def save(self, *, aside: bool = False) -> None:
        """Save, unless the run has no folder or this step lies there already.

        `aside`: while training goes on. Else the disk has it on return.
        """
        if self._folder is not None and self._saved_step != self._trainer.steps_done:
            self._trainer.save(self._folder, aside=aside)
            self._saved_step = self._trainer.steps_done
        if not aside:
            self._trainer.wait_for_save()

    def story(self) -> str:
        """Say what is saved and how to go on; wait for the disk."""
        self._trainer.wait_for_save()
        if self._folder is None:
            return "nothing is saved (--checkpoint-dir would have been the place)"
        if self._saved_step == 0:
            return "no checkpoint was written"
        return (
            f"{self._folder} has the checkpoint of step {self._saved_step}: go on from it with "
            f"evenstep train --resume --checkpoint-dir {shlex.quote(str(self._folder))}"
        )
