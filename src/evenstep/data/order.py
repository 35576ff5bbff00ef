"""The order of the examples, as a function of the seed and the epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from evenstep.batch.seeds import derive_seed
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


@dataclass(frozen=True, kw_only=True)
class LoaderPlace:
    """A position in a loader that is not evenstep's, as a checkpoint holds it.

    Attributes:
        loader: the loader's class.
        epoch: the epoch.
        step: the next batch.
        digest: a checksum of what the loader gives before it; None if it is unknown.
        snapshot: the loader's own state before this batch or an earlier one, the number of that
            batch, and the states of the generators that the loader draws from; empty without it.
        facts: what its batches depend on, by name; empty in a checkpoint of version 0.1.0.
        before: at the start of an epoch, the digest of the first batch of the one before, and the
            number of epochs that the loader has begun; empty where a resume need not compare it.
    """

    loader: str
    epoch: int
    step: int
    digest: int | None
    snapshot: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict, metadata={"later": True})
    before: list[int] = field(default_factory=list, metadata={"later": True})


def epoch_order(examples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order in which `epoch` visits the examples: a permutation, int64 (examples,).

    It depends only on the arguments; the global generator is not used.
    """
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(examples, generator=generator)
