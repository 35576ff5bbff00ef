"""What a record leaves out of evenstep's own trainings, and what it adds to them.

The copies of a model that devices compute with count as the model; what is computed to check the
user's code isn't recorded; models are met before a step, and its mean loss is noted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evenstep.batch.rng import generator_here
from evenstep.devices import accelerator
from evenstep.engine.task import IS_ASIDE
from evenstep.recording.watching import replaced
from evenstep.steps import minimise, update
from evenstep.training.trainer import Trainer


def is_aside() -> bool:
    """Whether the calling lane computes what belongs to no step."""
    return IS_ASIDE.get()


def draws_here() -> list[torch.Tensor]:
    """Return the states of the generators that random ops draw from here: torch's, or a shard's."""
    devices = [torch.device("cpu"), *accelerator.current()]
    return [generator_here(device).get_state() for device in devices]


def drawn_between(before: list[torch.Tensor], after: list[torch.Tensor]) -> str:
    """Return a digest of the random numbers that were drawn between two states; "" for none."""
    if all(map(torch.equal, before, after)):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for state in (*before, *after):
        digest.update(state.numpy().tobytes())
    return digest.hexdigest()


def watching_steps(
    before: Callable[[nn.Module], None], note_loss: Callable[[float], None]
) -> contextlib.ExitStack:
    """Have functions called with the model before each step, and with the step's mean loss.

    Returns:
        What ends that when it is closed.
    """

    def watched_cut(cut: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(cut)
        def watched(trainer: Trainer, *batch: Any) -> Any:
            before(trainer.model)
            return cut(trainer, *batch)

        return watched

    def watched_settle(settle: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(settle)
        def watched(*arguments: Any) -> Any:
            mean, count = settle(*arguments)
            note_loss(mean)
            return mean, count

        return watched

    stack = contextlib.ExitStack()
    stack.enter_context(replaced(Trainer, "_next_step", watched_cut))
    for module in (update, minimise):
        stack.enter_context(replaced(module, "settle", watched_settle))
    return stack
