"""Saves a training and resumes it: what a checkpoint gets, and where it goes back to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.checkpoint import fingerprint as fingerprints
from evenstep.checkpoint.async_writer import AsyncWriter, write_state
from evenstep.checkpoint.files import checkpoint_of, list_checkpoints, step_of
from evenstep.checkpoint.optimizer_kind import groups_of, kinds_of, scheduler_kinds
from evenstep.checkpoint.restore import Scheduler, optimizer_state, restore_all, scheduler_state
from evenstep.checkpoint.training_state import ModelState, TrainingState
from evenstep.checkpoint.user_state import UserState, encodable
from evenstep.data import Cursor
from evenstep.data.adapters.sources import Sources
from evenstep.devices import hash_seed
from evenstep.devices.facts import KINDS, Difference, differences, listed, refuse_to_resume
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import InputError
from evenstep.private_torch.optimizers import has_scheduler
from evenstep.replicas import inner_optimizers, refuse_strangers
from evenstep.steps.other_optimizers import OtherOptimizers
from evenstep.steps.step import Position
from evenstep.training.agreement import Agreement
from evenstep.training.notes import Notes, plain_state, say_lost
from evenstep.training.setup.parts import Parts

logger = logging.getLogger("evenstep")


class Saver:
    """Saves a training in checkpoints, and resumes one.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
        user_state: the user's objects that are saved too.
        parts: the parts of the trainer's steps.
        agreement: compares states before a checkpoint.
        sources: the loaders of the training.
        notes: says whether results are equal within rounding only.

    Attributes:
        writer: writes checkpoints in the background.
        other_optimizers: notes, while it is open, which optimizers beside the trainer's own step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        user_state: UserState,
        parts: Parts,
        agreement: Agreement,
        sources: Sources,
        notes: Notes,
    ) -> None:
        self.writer = AsyncWriter()
        self.other_optimizers = OtherOptimizers(model, optimizer, parts.left)
        self._model = model
        self._optimizer = optimizer
        self._user_state = user_state
        self._executor = parts.executor
        self._pipeline = parts.pipeline
        self._progress = parts.progress
        self._reporter = parts.reporter
        self._update = parts.update
        self._partition = parts.partition
        self._agreement = agreement
        self._sources = sources
        self._notes = notes
        self._left = parts.left
        self._values = parts.values
        self._was_saved = self._has_said_schedule = False
        self._folders = set[Path]()
        self._plain: dict[str, str] | None = plain_state(model, optimizer)  # None: it was said

    def save(
        self, folder: Path, scheduler: Scheduler | None, keep: int, *, background: bool
    ) -> Path:
        """Save everything that training resumes from (see `Trainer.save`)."""
        if INTERRUPTS.handler_runs:
            self._refuse_in_processes()
            self._executor.engine.waitall()  # a check or an evaluation may be in progress
        self._pipeline.finish()
        try:
            self._reporter.call_back()  # before a checkpoint that has these steps
        finally:
            with self._values.put_away(), self._left.undone():
                path = self._save(folder, scheduler, keep, background=background)
                steps_done = self._progress.position.steps_done
        written: Future[Path] | None = self.writer.pending if background else None
        self._reporter.saved(path, steps_done, written)
        return path

    def _refuse_in_processes(self) -> None:
        """Refuse to save in a signal handler, which runs at a different place in each process."""
        if not self._executor.group.is_alone:
            raise InputError(
                "a signal handler called save, but a signal reaches each of several processes at "
                "a different place, and all must save together: call trainer.ask_to_stop() in the "
                "handler, and save in your loop where trainer.should_stop is true"
            )

    def restore(
        self, saved: TrainingState, scheduler: Scheduler | None, *, is_part: bool = False
    ) -> None:
        """Go to where a training was saved.

        Args:
            saved: the training state.
            scheduler: the user's scheduler.
            is_part: whether it lacks the optimizer state that other processes will own.
        """
        then = saved.all_facts
        now = {**self._agreement.resumed_facts(), **self._kinds(scheduler)}
        refuse_to_resume(then, now)
        self._user_state.check(saved.user_state)
        restore_all(saved, self._model, self._optimizer, scheduler)
        seeds = saved.seeds_at or saved.cursor
        data = saved.cursor if saved.seeds_at else None
        position = Position(saved.steps_done, seeds.epoch, seeds.step, data)
        self._progress.resume(position, drawn=saved.cursor)
        rounds = self._say_differences(saved, [*differences(then, now)])
        self._sources.restore(saved.data, rounds=rounds)
        if self._executor.programs:
            self._executor.programs.compiles = saved.compiles
        self._executor.take_cut(saved.cut_by_time)
        if is_part:
            assert self._partition is not None
            self._partition.note_loaded(saved.check_fingerprint)
        else:
            saved.check_fingerprint(fingerprints.fingerprint(self._model, self._optimizer))
        self._user_state.restore(saved.user_state)

    def _say_differences(self, saved: TrainingState, different: Sequence[Difference]) -> bool:
        """Log what may matter; note, and return, whether numbers are rounded differently here."""
        rounds, said = (
            [one for one in different if KINDS[one.kind].resumed == verdict]
            for verdict in ("rounds", "said")
        )
        if rounds:
            causes = [one for one in different if one.kind == "instructions"]
            self._notes.note_rounding(
                f"the checkpoint was saved where numbers are rounded differently: here "
                f"{listed([*causes, *rounds])}"
            )
        elif saved.within_rounding and not self._notes.within_rounding:
            self._notes.note_rounding("the checkpoint is from devices or processes of mixed kinds")
        for one in said:
            logger.warning("the training resumes with %s: %s", one, KINDS[one.kind].fix)
        return bool(rounds)

    def _save(
        self, folder: Path, scheduler: Scheduler | None, keep: int, *, background: bool
    ) -> Path:
        self._update.refuse_half_step()
        self._say_what_is_not_saved()
        self._say_what_is_later(folder)
        self._say_scheduler(scheduler)
        self._say_attributes()
        self.other_optimizers.say_what_is_lost(self._user_state.read)
        refuse_strangers(self._model.parameters(), self._optimizer)
        lost = self._agreement.compare_to_save()
        if self._partition is not None and self._partition.is_split:
            if lost is not None:  # and with it the state that it owned
                raise lost
            step, read = (
                self._progress.position.steps_done,
                functools.partial(self._state, scheduler),
            )
            return self._partition.save(folder, step, read, keep, background=background)
        state = self._state(scheduler)
        entries = fingerprints.named_state(self._model, self._optimizer)
        given = folder, state, entries, keep
        group = self._executor.group
        if background and self.writer.is_open and lost is None:
            if group.is_first:
                self.writer.start(*given)
            return checkpoint_of(folder, state.steps_done)
        self.writer.wait()
        if lost is not None:
            if group.is_first:
                write_state(*given)
            raise lost
        return group.by_the_first(lambda: write_state(*given))

    def _state(self, scheduler: Scheduler | None) -> TrainingState:
        position, programs = self._progress.position, self._executor.programs
        return TrainingState(
            experiment=self._executor.experiment,
            cursor=position.cursor,
            seeds_at=None if position.cursor == position.seeds_at else position.seeds_at,
            steps_done=position.steps_done,
            compiles=programs.compiles if programs else None,
            model=ModelState.of(self._model),
            optimizer=optimizer_state(self._optimizer),
            scheduler=scheduler_state(scheduler) if scheduler else None,
            optimizers=kinds_of(self._optimizer),
            within_rounding=self._notes.within_rounding,
            data=encodable(self._sources.saved_at(position.cursor)),
            user_state=self._user_state.read(),
            cut_by_time={**self._executor.cut_by_time},
            hash_seed=hash_seed(),
            facts={**self._agreement.saved_facts(), **self._kinds(scheduler)},
        )

    def _kinds(self, scheduler: Scheduler | None) -> dict[str, dict[str, Any]]:
        """Return what the optimizer's groups hold and of what kind the scheduler is, as facts."""
        groups = {"groups": groups_of(self._model, self._optimizer)}
        return {**groups, "scheduler": scheduler_kinds(scheduler)} if scheduler else groups

    def _say_what_is_later(self, folder: Path) -> None:
        """Log once for a folder that it has a checkpoint which is loaded instead of this one."""
        if folder in self._folders or not self._executor.group.is_first:
            return
        self._folders.add(folder)
        own = checkpoint_of(folder, self._progress.position.steps_done)
        for one in list_checkpoints(folder)[-1:]:
            if step_of(one) > step_of(own):
                logger.warning(
                    f"{folder} has {one.name} of an earlier training, which Trainer.load takes "
                    f"instead of {own.name}, as it is later, and which `keep` leaves there: remove "
                    f"it, or give each training a folder of its own"
                )

    def _say_attributes(self) -> None:
        """Log once which attributes have changed that are in no checkpoint."""
        if self._plain is not None:
            now = plain_state(self._model, self._optimizer)
            self._plain = None if say_lost(self._plain, now) else self._plain

    def _say_what_is_not_saved(self) -> None:
        """Log once what a training with a data loader of the user's own must restore by itself."""
        progress = self._progress
        if self._was_saved or not progress.position.steps_done or progress.drawn != Cursor():
            return
        self._was_saved = True
        lacks = []
        if not self._user_state.has_loader:
            lacks.append(
                "the position in a loader that you iterate yourself (use trainer.epoch(loader), or "
                "after resuming, continue with batch number trainer.cursor.step)"
            )
        if not self._user_state.has_generators:
            lacks.append(
                "the states of random, numpy.random and torch's default generator (use "
                "Trainer(state={'random': evenstep.data.GeneratorStates()}))"
            )
        if lacks:
            logger.warning("the checkpoint does not hold %s", "; nor ".join(lacks))

    def _say_scheduler(self, scheduler: Scheduler | None) -> None:
        """Log once that a scheduler of the optimizer is in no checkpoint."""
        if self._has_said_schedule or scheduler is not None or self._user_state.has_scheduler:
            return
        own = self._optimizer, *inner_optimizers(self._optimizer, own_state=False).values()
        if any(map(has_scheduler, own)):
            self._has_said_schedule = True
            logger.warning(
                "the checkpoint does not hold the learning-rate scheduler that was made for the "
                "optimizer, so a resumed training would begin its schedule anew: write "
                "Trainer(..., scheduler=scheduler), and Trainer.load(..., scheduler=scheduler)"
            )
