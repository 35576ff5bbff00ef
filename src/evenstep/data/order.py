"""The order of the examples, as a function of the seed and the epoch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evenstep.batch.rng import derive_seed
from evenstep.errors import InputError


@dataclass(frozen=True)
class Cursor:
    """A position in the data: before batch `step` of epoch `epoch`, both counted from 0.

    Raises InputError if a number is negative.
    """

    epoch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            raise InputError(f"got {self}: epoch and step count from 0")


def epoch_order(examples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order in which `epoch` visits the examples: a permutation, int64 (examples,).

    It depends only on the arguments; the global generator is not used.
    """
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(examples, generator=generator)
