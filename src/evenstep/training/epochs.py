"""The loops over a training's data: which batch comes next, and where an epoch ends."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Generator, Iterator

from evenstep.batch import Batch
from evenstep.callbacks import EpochStart
from evenstep.contract.lone_examples import LoneExamples
from evenstep.data import Cursor
from evenstep.data.adapters.sources import Batches, Source, Sources, length_of
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import InputError, hides_own_frames
from evenstep.training.setup.arguments import Chosen
from evenstep.training.setup.parts import Parts

logger = logging.getLogger("evenstep")


class RestOfEpoch(Iterator[Batch]):
    """The batches that an epoch has left, to be looped over once: what `Trainer.epoch` returns.

    `len` is their number when the loop begins, where the loader has a length; so tools that show
    progress, such as tqdm, know how much is to come.
    """

    def __init__(self, loader: Batches, first: int, batches: Generator[Batch, None, None]) -> None:
        self._loader = loader
        self._first = first
        self._batches = batches
        self._loops = 0

    def __len__(self) -> int:
        length = length_of(self._loader)
        if length is None:
            raise TypeError(
                f"the loop has no length, because {type(self._loader).__name__} has none"
            )
        return max(0, length - self._first)

    @hides_own_frames
    def __iter__(self) -> Iterator[Batch]:
        """Return what yields the batches that are left.

        Raises:
            InputError: a loop over them has ended already, so a second one would be empty.
        """
        self._loops += 1
        # The second: who takes some batches at a time (`islice`) has begun more loops before.
        if self._loops == 2 and inspect.getgeneratorstate(self._batches) == inspect.GEN_CLOSED:
            raise InputError(
                "what trainer.epoch returns can be looped over once, and that loop has ended: call "
                "trainer.epoch(loader) anew in each epoch"
            )
        return self._batches

    def __next__(self) -> Batch:
        return next(self._batches)


class Epochs:
    """Yields the batches of a training, and notes how far it is in them.

    Args:
        parts: the parts of the trainer's steps.
        chosen: experiment, devices, layout and faults.
        lone_examples: gets the number of examples of an epoch's last batch.

    Inside `with`, worker processes of loaders may be kept from epoch to epoch.

    Attributes:
        sources: the loaders of the training.
    """

    def __init__(self, parts: Parts, chosen: Chosen, lone_examples: LoneExamples) -> None:
        self._experiment = parts.executor.experiment
        self._lone_examples = lone_examples
        self._executor = parts.executor
        self._pipeline = parts.pipeline
        self._progress = parts.progress
        self._timekeeper = parts.timekeeper
        self._reporter = parts.reporter
        self._overlaps = chosen.overlaps
        self.sources = self._new_sources(are_kept=True)
        self._is_inside = self._has_said_it = False

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, *error: object) -> None:
        self.sources.close()

    @property
    def here(self) -> Cursor:
        """The place of the batch that a loop over an epoch yields next."""
        return self._progress.position.data or self._progress.drawn

    def epoch(self, loader: Batches, *, whole: bool) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch (see `Trainer.epoch`)."""
        INTERRUPTS.follow()
        source = self.sources.of(loader)
        self._lone_examples.expect(source.last_examples)
        self._wait_before_exchange()
        start = self.here
        self._report(start, length_of(loader))
        batches = self._batches(source, start, "epoch", whole=whole)
        self._say_what_is_left(start)
        self._is_inside = True
        began_s = time.perf_counter()
        for step, batch in enumerate(batches, start.step):
            self._note_drawn(Cursor(start.epoch, step), began_s)
            yield batch
            self._executor.group.note("loading a batch")
            began_s = time.perf_counter()
        self._wait_before_exchange()
        self._executor.group.compare_ends(source, "epoch")
        self._is_inside = False
        self._progress.end_epoch(start.epoch)
        self._reporter.epoch_ended(start.epoch, self._progress.position.steps_done)

    def batches(self, loader: Batches) -> Iterator[Batch]:
        """Yield the batches of the loader's epoch 0 (see `Trainer.batches`)."""
        self._wait_before_exchange()
        with contextlib.closing(self._new_sources(are_kept=False)) as sources:
            yield from self._batches(sources.of(loader), Cursor(), "batches")

    def refuse_inside_loader(self) -> None:
        """Refuse a call of the loader's own, while it draws a batch beside steps in flight."""
        if self._overlaps and self.sources.draws_in == threading.get_ident():
            raise InputError(
                "the loader calls the trainer while it draws a batch for trainer.epoch, with steps "
                "in flight: call the trainer in the loop instead, or use max_in_flight=1"
            )

    def _new_sources(self, *, are_kept: bool) -> Sources:
        return Sources(self._experiment.seed, locked=self._overlaps, are_kept=are_kept)

    def _batches(
        self, source: Source, start: Cursor, call: str, *, whole: bool = False
    ) -> Iterator[Batch]:
        def steps_done() -> int:
            return self._progress.position.steps_done

        return self._executor.group.batches(source, start, steps_done, call, whole=whole)

    def _report(self, start: Cursor, steps: int | None) -> None:
        """Report the start of a loop over an epoch of `steps` batches."""
        done = self._progress.position.steps_done
        self._reporter.epoch_began(
            EpochStart(epoch=start.epoch, step=done, first=start.step, steps=steps)
        )

    @INTERRUPTS.uninterrupted
    def _wait_before_exchange(self) -> None:
        """Wait for the steps in flight before this thread exchanges messages with processes."""
        if not self._executor.group.is_alone:
            self._pipeline.wait()

    @INTERRUPTS.uninterrupted
    def _note_drawn(self, place: Cursor, began_s: float) -> None:
        """Note that the batch at `place` was loaded since `began_s`, and will be yielded."""
        self._timekeeper.loaded(began_s)
        self._progress.draw(place)

    def _say_what_is_left(self, place: Cursor) -> None:
        """Say once that a loop over an epoch was left, because the next one yields the rest."""
        if self._is_inside and place.step and not self._has_said_it:
            self._has_said_it = True
            logger.warning(
                "the loop over trainer.epoch was left after %d batch%s of epoch %d, so the next "
                "one yields the rest of that epoch: to count whole epochs, write `while "
                "trainer.cursor.epoch < epochs`",
                place.step,
                "es" * (place.step > 1),
                place.epoch,
            )
