"""Detects random ops in the model while it trains, so that models without them pay nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.rng import DEFAULT_GENERATORS, default_generator
from evenstep.shard.loss import Number, ShardObjective

T = TypeVar("T")
States: TypeAlias = "list[torch.Tensor]"
"""The states of the default generators."""


class DrawWatch:
    """Watches the default generators, so that a step that drew from them is computed again.

    `ShardRandomness` gives every shard generators of its own, at a cost for each op. It is used
    only after a random op was seen.

    Attributes:
        draws: whether the model was seen to use random ops; from then on its shards have
            generators of their own.
        watch_backward: whether backward passes are watched too: until a step with `draws` is done.
        is_first_step: whether no training step was done since the model was last changed.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.draws = False
        self.watch_backward = True
        self.is_first_step = True
        kinds = sorted({*devices, torch.device("cpu")}, key=str)
        self._generators = [default_generator(device) for device in kinds]
        self._seen_between = False

    def states(self) -> States | None:
        """Return the states of the default generators for `drew`; None if nothing is watched."""
        return None if self.draws else self._now()

    def drew(self, before: States | None) -> bool:
        """Return whether random ops drew from a default generator since `before`."""
        if before is None:
            return False
        return self._seen_between or not all(map(torch.equal, self._now(), before))

    def note_draws(self, before: States | None, *, restore: bool) -> None:
        """From now on, give shards generators of their own; the last step must be repeated.

        Args:
            before: the states before that step.
            restore: whether to put the default generators back. Do not where the user's thread
                went on meanwhile: it may have drawn from them itself.
        """
        self.draws = True
        if restore and before is not None:
            with DEFAULT_GENERATORS:
                for generator, state in zip(self._generators, before, strict=True):
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
            raise error
        return result

    def watched(self, objective: ShardObjective) -> ShardObjective:
        """In the first step, make `objective` look for draws after each forward pass too.

        Where activations are recomputed, looking at the end of the step is too late: recomputing
        restores the default generator's state from the forward pass. In later steps the end must
        do, since looking costs 16 µs a shard.
        """
        if self.draws or not self.is_first_step:
            return objective
        before = self._now()

        def watched(
            model: nn.Module, batch: Batch, examples: int | None
        ) -> tuple[torch.Tensor, Number]:
            result = objective(model, batch, examples)
            if not all(map(torch.equal, self._now(), before)):
                self._seen_between = True
            return result

        return watched

    def look_again(self) -> None:
        """Watch the next step as the first one was: the user has changed the module."""
        self.is_first_step = self.is_first_step or not self.draws

    def step_done(self) -> None:
        """Note that a training step was done."""
        self.is_first_step = False
        self.watch_backward = not self.draws

    def _now(self) -> States:
        with DEFAULT_GENERATORS:
            return [generator.get_state() for generator in self._generators]
