"""Hands the records of steps, epochs and checkpoints to the user's callbacks, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch

from evenstep.callbacks import Callback, EpochRecord, EpochStart, SaveRecord, StepRecord
from evenstep.engine.interrupts import interruptible
from evenstep.errors import InputError, add_note, shown
from evenstep.profiling.clock import Timekeeper
from evenstep.steps.pipeline import Pipeline
from evenstep.steps.step import Step, StepLoss

Take: TypeAlias = Callable[[Step], StepLoss]
Record: TypeAlias = "StepRecord | EpochStart | EpochRecord | SaveRecord"

_NO_STEPS = EpochRecord(epoch=0, step=0, steps=0, examples=0, loss=None, seconds=0.0)


class _Event(NamedTuple):
    """Something to report once a step has ended.

    Attributes:
        step: the step that has to end first; None for none.
        call: reports it.
    """

    step: Step | None
    call: Callable[[], None]


class Reporter:
    """Inside `with`, calls the callbacks that run in this process; none of their calls is nested.

    Args:
        callbacks: the user's.
        optimizer: its learning rates are reported.
        pipeline: has the steps that have not ended.
        timekeeper: has the times of those that have.
        devices: names of the devices.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        optimizer: torch.optim.Optimizer,
        pipeline: Pipeline,
        timekeeper: Timekeeper,
        devices: Sequence[str],
    ) -> None:
        self.callbacks = callbacks
        self._active: list[Callback] = []
        self._optimizer = optimizer
        self._pipeline = pipeline
        self._timekeeper = timekeeper
        self._devices = devices
        self._events: deque[_Event] = deque()
        self._saves: deque[tuple[Future[Path], SaveRecord]] = deque()
        self._is_calling_back = False
        self._epoch = _NO_STEPS
        self._total = 0.0
        self._open = contextlib.ExitStack()

    def opened(self, steps_done: int, *, is_first: bool) -> Reporter:
        """Choose the callbacks that run in this process, and open them; return itself."""
        self._active = [one for one in self.callbacks if is_first or one.every_process]
        with contextlib.ExitStack() as stack:
            for one in self._active:
                interruptible(one.open, steps_done)
                stack.callback(interruptible, one.close)
            self._open = stack.pop_all()
        return self

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Report what is left, and close the callbacks. An error is added to one being raised."""
        try:
            with self._open:
                self.call_back()
        except Exception as failure:
            if error is None:
                raise
            add_note(error, f"a callback failed as well: {failure!r}")
        finally:
            self._active = []
            self._events.clear()
            self._saves.clear()

    # ---- events

    def watching(self, take: Take) -> Take:
        """Return what takes a step and reports it."""
        return functools.partial(self._take, take) if self.callbacks else take

    def _take(self, take: Take, step: Step) -> StepLoss:
        lrs = self._lrs()
        try:
            loss = take(step)
        finally:  # after an error of `after_update`, it was taken all the same
            self.add_step(step, lrs)
        self.call_back()
        return loss

    def add_step(self, step: Step, lrs: tuple[float, ...] | None = None) -> None:
        """Report a submitted step when it has ended, with the learning rates of now, or others."""
        if self._active:
            lrs = self._lrs() if lrs is None else lrs
            self._events.append(_Event(step, functools.partial(self._call_step, step, lrs)))

    def _lrs(self) -> tuple[float, ...]:
        return tuple(float(group.get("lr", 0.0)) for group in self._optimizer.param_groups)

    def epoch_began(self, start: EpochStart) -> None:
        """Report the start of a loop over an epoch, after the steps before it."""
        self._add(functools.partial(self._call, "on_epoch_start", start))

    def epoch_ended(self, epoch: int, steps_done: int) -> None:
        """Report the end of an epoch after its steps."""
        self._add(functools.partial(self._call_epoch, epoch, steps_done))

    def _add(self, call: Callable[[], None]) -> None:
        """Report something after all that was added before."""
        if self._active:
            self._events.append(_Event(None, call))
            self.call_back()

    def saved(self, path: Path, step: int, written: Future[Path] | None) -> None:
        """Report a checkpoint, as soon as it is `written` if that is not done yet."""
        if self._active:
            record = SaveRecord(step=step, path=path)
            if written is None:
                self._add(functools.partial(self._call, "on_save", record))
            else:
                self._saves.append((written, record))
                self.call_back()

    def call_back(self) -> None:
        """Report everything that has ended, oldest first; wait for nothing."""
        if self._is_calling_back:  # called by a callback
            return
        self._is_calling_back = True
        try:
            while self._events and self._events[0].step not in self._pipeline.steps:
                self._events.popleft().call()
            while self._saves and self._saves[0][0].done():
                written, record = self._saves.popleft()
                if written.exception() is None:
                    self._call("on_save", record)
        finally:
            self._is_calling_back = False

    # ---- records

    def _call_step(self, step: Step, lrs: tuple[float, ...]) -> None:
        if not step.is_taken:
            return
        self._timekeeper.add_up()
        seconds, busy = step.attempt.clock.times(len(self._devices))
        record = StepRecord(
            step=step.number + 1,
            epoch=step.position.cursor.epoch,
            loss=step.loss,
            outputs=step.outputs,
            lrs=lrs,
            examples=step.part.examples,
            seconds=seconds,
            busy=dict(zip(self._devices, busy, strict=True)),
        )
        self._begin_epoch(record.epoch)
        epoch, self._total = self._epoch, self._total + record.loss * record.examples
        examples = epoch.examples + record.examples
        self._epoch = EpochRecord(
            epoch=record.epoch,
            step=record.step,
            steps=epoch.steps + 1,
            examples=examples,
            loss=self._total / examples if examples else None,
            seconds=epoch.seconds + record.seconds,
        )
        try:
            self._call("on_step", record)
        except BaseException as error:
            step.note_taken(error)
            raise

    def _call_epoch(self, epoch: int, steps_done: int) -> None:
        self._begin_epoch(epoch)
        self._call("on_epoch", dataclasses.replace(self._epoch, step=steps_done))

    def _begin_epoch(self, epoch: int) -> None:
        if self._epoch.epoch != epoch:
            self._epoch, self._total = dataclasses.replace(_NO_STEPS, epoch=epoch), 0.0

    def _call(self, method: str, record: Record) -> None:
        """Call a method of every callback; then raise the first error, if there was one."""
        errors = [_error_of(getattr(one, method), record) for one in self._active]
        for error in filter(None, errors):
            raise error


def _error_of(method: Callable[[Any], None], record: Record) -> Exception | None:
    try:
        interruptible(method, record)
    except Exception as error:
        return error
    return None


def check_callbacks(callbacks: object) -> list[Callback]:
    """Return the callbacks as a list.

    Raises:
        InputError: it is no list of them.
    """
    if callbacks is None:
        return []
    whole: list[Any] = [*callbacks] if isinstance(callbacks, list | tuple) else [callbacks]
    for one in whole:
        if not isinstance(one, Callback):
            raise InputError(
                f"got {shown(one)} in callbacks: give a list of objects of classes that derive "
                f"from evenstep.callbacks.Callback"
            )
    return whole
