"""Detects random ops in the model while it trains, so that models without them pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from evenstep.batch.rng import CALLERS_GENERATORS, DEFAULT_GENERATORS, default_generator

T = TypeVar("T")


class States(NamedTuple):
    """The states of the default generators.

    Attributes:
        times_set: how often the CPU's generator was set: draws in one lane can be undone in another
            (`torch.random.fork_rng`), so that the states alone would not show them.
        states: their states.
    """

    times_set: int
    states: list[torch.Tensor]


class DrawWatch:
    """Watches the default generators, so that a step that drew from them is computed again.

    `ShardRandomness` gives every shard generators of its own, at a cost for each op. It is used
    only after a random op was seen.

    Attributes:
        draws: whether the model was seen to use random ops; from then on its shards have
            generators of their own.
        is_first_step: whether no training step was done since the model was last changed.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.draws = False
        self.is_first_step = True
        kinds = sorted({*devices, torch.device("cpu")}, key=str)
        self._generators = [default_generator(device) for device in kinds]

    def states(self) -> States | None:
        """Return the states of the default generators for `drew`; None if nothing is watched."""
        return None if self.draws else self._now()

    def drew(self, before: States | None) -> bool:
        """Return whether random ops drew from a default generator since `before`."""
        if before is None:
            return False
        now = self._now()
        was_set = now.times_set != before.times_set
        return was_set or not all(map(torch.equal, now.states, before.states))

    def note_draws(self, before: States | None, *, restore: bool) -> None:
        """From now on, give shards generators of their own; the last step must be repeated.

        Args:
            before: the states before that step.
            restore: whether to put the default generators back. Do not where the user's thread
                went on meanwhile: it may have drawn from them itself.
        """
        self.draws = True
        if restore:
            self.put_back(before)

    def put_back(self, before: States | None) -> None:
        """Put the default generators back to `before`, if anything drew from them since."""
        if before is not None and self.drew(before):
            with DEFAULT_GENERATORS:
                for generator, state in zip(self._generators, before.states, strict=True):
                    generator.set_state(state)

    def repeat(self, attempt: Callable[[], T]) -> T:
        """Return `attempt()`; if it drew from a default generator, repeat it with shards' own.

        The default generators are left as they were.
        """
        before = self.states()
        error: BaseException | None = None
        try:
            result = attempt()
        except BaseException as caught:
            error = caught
        if self.drew(before) and (error is None or isinstance(error, Exception)):
            self.note_draws(before, restore=True)
            return attempt()
        if error is not None:
            self.put_back(before)
            raise error
        return result

    def look_again(self) -> None:
        """Watch the next step as the first one was: the user has changed the module."""
        self.is_first_step = self.is_first_step or not self.draws

    def _now(self) -> States:
        with DEFAULT_GENERATORS:
            states = [generator.get_state() for generator in self._generators]
        return States(CALLERS_GENERATORS.times_set, states)
