"""The order of the examples: a pure function of the seed and the epoch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenstep.batch.rng import derive_seed
from evenstep.errors import InputError


@dataclass(frozen=True)
class Cursor:
    """A place in the data: the first `step` batches of epoch `epoch` are done.

    Raises InputError for a negative number.
    """

    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            raise InputError(f"got {self}: epoch and step count from 0")


def epoch_order(examples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order in which `epoch` visits the examples: a permutation, int64 (examples,).

    It depends on the three arguments alone; the global generator is neither read nor moved.
    """
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(examples, generator=generator)
