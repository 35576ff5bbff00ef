"""Notices random numbers that a user's loop draws for its part of a batch.

In one process the loop would draw them for the whole batch, and so others. Whether a number is for
the examples can't be known (one for the batch does no harm), so this is said, not refused.
"""

from __future__ import annotations

import logging
from typing import Any

from evenstep.batch import Part
from evenstep.batch.rng import DEFAULT_GENERATORS
from evenstep.data.generators import DEFAULTS, same_state

logger = logging.getLogger("evenstep")

_NAMES = ("torch", "random", "numpy.random")  # in the order of DEFAULTS


class LoopDraws:
    """Compares the default generators between the yield of a batch and its first step."""

    def __init__(self) -> None:
        self._part: Part | None = None
        self._states: list[Any] = []
        self._has_said_it = False

    def begin(self, part: Part) -> None:
        """Note the states when a part of a batch is about to be yielded."""
        if not self._has_said_it and part.own_examples < part.examples:
            self._part, self._states = part, _states()

    def end(self, part: Part) -> None:
        """Say once which generators have changed since then, at the first step on the part."""
        if part is not self._part:
            return
        self._part = None
        pairs = zip(_NAMES, self._states, _states(), strict=True)
        names = [f"{name}'s" for name, before, now in pairs if not same_state(before, now)]
        if names:
            self._has_said_it = True
            logger.warning(
                "the loop has drawn random numbers from %s default generator between "
                "trainer.epoch and the step, where this process has %d of the batch's %d examples: "
                "numbers for single examples (noise, mixup, time steps) would be different ones "
                "with a different number of processes. Draw them for whole batches: "
                "trainer.epoch(loader, whole=True)",
                " and ".join(names),
                part.own_examples,
                part.examples,
            )


def _states() -> list[Any]:
    with DEFAULT_GENERATORS:  # with steps in flight, a lane may have lent one
        return [generator.read() for generator in DEFAULTS]
