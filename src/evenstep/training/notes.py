"""Notes for the user about the devices of a trainer, and about how exact its results are."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from evenstep.devices import Device, layout_notes, rounding_notes
from evenstep.devices.discovery import WITHIN_ROUNDING
from evenstep.options.experiment import Experiment
from evenstep.private_torch.modules import BatchNorm, Dropout

logger = logging.getLogger("evenstep")

_MODAL = BatchNorm, Dropout
"""Layers that compute something else in evaluation mode."""


class _Earlier(NamedTuple):
    """A trainer of an optimizer: the steps that it has done, and whether it was only loaded."""

    steps_done: int
    is_loaded: bool


_EARLIER = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Earlier]()
"""The last trainer of each optimizer, unless it is open."""


def note_trained(
    optimizer: torch.optim.Optimizer, steps_done: int, *, is_loaded: bool = False
) -> None:
    """Note that a trainer of an optimizer was closed, or only loaded, after some steps."""
    if steps_done:
        _EARLIER[optimizer] = _Earlier(steps_done, is_loaded)


def say_who_trained(optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Log that a trainer that opens begins anew with what another one has trained or loaded.

    Args:
        optimizer: the optimizer of both.
        steps_done: how far the one that opens is.
    """
    earlier = _EARLIER.pop(optimizer, None)
    if earlier is None or steps_done:
        return
    if earlier.is_loaded:
        logger.warning(
            "Trainer.load has returned a trainer that continues after step %d, but this one "
            "begins at step 0 with the loaded values: write trainer = evenstep.Trainer.load(...), "
            "and train with that one",
            earlier.steps_done,
        )
    else:
        logger.warning(
            "another trainer has done %d steps with this optimizer, and this one begins again at "
            "epoch 0, with the same order of examples and the same random numbers as that one: "
            "use one trainer for all epochs (`while trainer.cursor.epoch < epochs`), or save, and "
            "go on by Trainer.load",
            earlier.steps_done,
        )


class Notes:
    """The notes of a trainer.

    Attributes:
        lines: a line for each.
        within_rounding: whether results are equal to those of other devices within rounding, not
            bit for bit.
    """

    def __init__(self, devices: Sequence[Device], experiment: Experiment) -> None:
        self._has_said_mode = False
        self.lines = layout_notes(devices, experiment.shards)
        self.within_rounding = bool(rounding_notes(devices))
        if experiment.shards > 1 and not experiment.separable:
            self.lines.append(
                f"separable=False: the result depends on the number of shards, {experiment.shards}"
            )

    def note_copies(self, names: Sequence[str]) -> None:
        """Note that devices compute on copies of the model, since these tensors lie badly."""
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.lines.append(
                f"{names[0]}{more} of the model don't begin at multiples of 64 bytes, and "
                f"something else may hold their memory (a flat tensor, a numpy array, a mapped "
                f"file), so the devices compute on copies, which every step updates. To spare "
                f"them: for one in model.parameters(): one.data = one.data.clone()"
            )

    def say_mode(self, model: nn.Module) -> None:
        """Log once that a model is trained in evaluation mode, if that makes a difference."""
        if self._has_said_mode:
            return
        self._has_said_mode = True
        modal = [one for one in model.modules() if isinstance(one, _MODAL) and not one.training]
        kinds = dict.fromkeys(type(one).__name__ for one in modal)
        if kinds:
            logger.warning(
                "the model is in evaluation mode, which changes what %s compute: call "
                "model.train() before the step",
                " and ".join(kinds),
            )

    def note_rounding(self, reason: str) -> str:
        """Note that results are equal within rounding only; return the line."""
        self.within_rounding = True
        note = f"{reason}: {WITHIN_ROUNDING}"
        if note not in self.lines:
            self.lines.append(note)
        return note
