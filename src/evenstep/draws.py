"""Whether a model draws random numbers: found out while it trains, so that others don't pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from evenstep.objective import Number, ShardObjective
from evenstep.rng import default_states, have_moved, restore_default_states
from evenstep.sharding import Batch

T = TypeVar("T")


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

    def repeat(self, attempt: Callable[[], T]) -> T:
        """Return `attempt()`, whose random ops did not come from a default generator.

        If they did, it is done again with generators for each shard, now and from here on. The
        default generators are left as they were.
        """
        if self.draws:
            return attempt()
        before = default_states(self._devices)
        error: BaseException | None = None
        try:
            result = attempt()
        except BaseException as caught:
            error = caught
        drew = restore_default_states(self._devices, before) or self._seen_between
        if drew and (error is None or isinstance(error, Exception)):
            self.draws = True
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

    def step_done(self) -> None:
        """Note that a training step has gone through."""
        self._is_first_step = False
        self.watch_backward = not self.draws
