"""Makes random augmentation repeatable: an example depends only on (seed, epoch, index)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from evenstep.batch.rng import DEFAULT_GENERATORS, derive_seed
from evenstep.engine.interrupts import INTERRUPTS, interruptible

T = TypeVar("T")


@dataclass(frozen=True)
class SeededExamples(Dataset[Any]):
    """A map-style data set whose random augmentation does not depend on the worker.

    If `dataset` draws from torch's default CPU generator, `random` or `numpy.random`, an example is
    the same for the same (seed, epoch, index), in any worker process and after resuming. This does
    not hold for a data set with a generator of its own that it keeps between examples.
    """

    dataset: Dataset[Any]
    seed: int
    epoch: int

    @INTERRUPTS.uninterrupted
    def __getitem__(self, index: int) -> Any:
        """Return example `index`, augmented for this epoch."""
        with seeded(derive_seed("example", self.seed, self.epoch, index)):
            return interruptible(without_end, self.dataset.__getitem__, index)


def without_end(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, which makes a part of a batch.

    Raises:
        RuntimeError: it has raised StopIteration, which would end the loop over the batches; so
            Python lets it leave generators.
    """
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("the data set, or its collate_fn, raised StopIteration") from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the three global generators and use one intra-op thread; restore both at the end.

    One thread, because worker processes have one: otherwise a sum over an image could differ by a
    bit. The generators are shared by the process, so lanes are locked out of torch's meanwhile.
    (A worker process has no lanes, and may have been forked while a lane held the lock.)
    """
    with DEFAULT_GENERATORS if get_worker_info() is None else nullcontext():
        yield from _seeded(seed)


def _seeded(seed: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch_state, random_state, numpy_state = (
        torch.default_generator.get_state(),
        random.getstate(),
        np.random.get_state(),
    )
    try:
        torch.set_num_threads(1)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would move the GPUs' too
        random.seed(seed)
        np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
        yield
    finally:
        torch.set_num_threads(threads)
        torch.default_generator.set_state(torch_state)
        random.setstate(random_state)
        np.random.set_state(numpy_state)
