"""Whether a model draws random numbers: found out while it trains, so that others don't pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.rng import default_states, have_moved, restore_default_states
from evenstep.shard.loss import Number, ShardObjective

T = TypeVar("T")
States: TypeAlias = "list[torch.Tensor]"
"""The states of the default generators."""


class DrawWatch:
    """Watches the default generators, and has a step that drew from them done again.

    `ShardRandomness` gives every shard generators of its own but costs time for each op. So it is
    left out until a random op is seen.

    Attributes:
        draws: whether the model was seen to use random ops; from then on its shards have
            generators of their own.
        watch_backward: whether backward passes are to be looked at too: until one has gone through
            with `draws`.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.draws = False
        self.watch_backward = True
        self._devices = sorted({*devices, torch.device("cpu")}, key=str)
        self._is_first_step = True
        self._seen_between = False

    def states(self) -> States | None:
        """Return the default generators' states, to be given to `drew`; None if it need not be."""
        return None if self.draws else default_states(self._devices)

    def drew(self, before: States | None) -> bool:
        """Say whether random ops drew from a default generator since `before`."""
        return before is not None and (self._seen_between or have_moved(self._devices, before))

    def note_draws(self, before: States | None, *, restore: bool) -> None:
        """From now on give shards generators of their own; the last step is to be done again.

        Args:
            before: the states before that step.
            restore: whether to put the default generators back. Not where the front end went on
                meanwhile, and may have drawn from them itself.
        """
        self.draws = True
        if restore and before is not None:
            restore_default_states(self._devices, before)

    def repeat(self, attempt: Callable[[], T]) -> T:
        """Return `attempt()`, whose random ops did not come from a default generator.

        If they did, it is done again with generators for each shard, now and from here on. The
        default generators are left as they were.
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
        """In the first step, let `objective` look for draws after each forward pass too.

        The end of the attempt can be too late to see them: where activations are recomputed, every
        lane puts the default generator back to what it was when the lane began to. In later steps
        the end must do: looking costs 16 µs a shard.
        """
        if self.draws or not self._is_first_step:
            return objective
        before = default_states(self._devices)

        def watched(model: nn.Module, batch: Batch, alone: bool) -> tuple[torch.Tensor, Number]:
            result = objective(model, batch, alone)
            if have_moved(self._devices, before):
                self._seen_between = True
            return result

        return watched

    @property
    def is_first_step(self) -> bool:
        """Whether no training step has gone through yet, since the module may draw."""
        return self._is_first_step

    def look_again(self) -> None:
        """The user has changed the module: the next step is looked at as the first one was."""
        self._is_first_step = self._is_first_step or not self.draws

    def step_done(self) -> None:
        """Note that a training step has gone through."""
        self._is_first_step = False
        self.watch_backward = not self.draws
