"""Examples of a map-style data set, fetched so that they are the same in any worker process.

These classes stand for the user's data set, `collate_fn` and `worker_init_fn` in a `DataLoader`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate, default_convert, get_worker_info

from evenstep.batch.rng import derive_seed
from evenstep.data.generators import Generator, Lent, drew_nothing, generators_of, tell_epoch
from evenstep.data.seeded import without_end
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import INTERRUPTS


class Wanted(NamedTuple):
    """A batch, or the part of one that a process computes, to be fetched.

    Attributes:
        epoch: the epoch.
        step: the batch's number in it.
        first: the place of the first example in the whole batch.
        index: what the loader's batch sampler (or, without batches, its sampler) gave.
    """

    epoch: int
    step: int
    first: int
    index: Any


class _Fetched(NamedTuple):
    """The examples of a batch, before they are collated."""

    examples: Any
    wanted: Wanted


class Examples(Dataset[Any]):
    """A data set whose examples draw from seeded generators, in any process.

    Most data sets draw nothing. So a batch is fetched at once, as torch does; from the first one
    that drew on, each example is fetched by itself, with the generators seeded for it.
    """

    def __init__(self, dataset: Any, seed: int, is_batched: bool) -> None:
        self.dataset = dataset
        self._seed = seed
        self._is_batched = is_batched
        self._draws = False
        self._epoch: int | None = None
        self._generators: tuple[Generator, ...] | None = None

    def __getitems__(self, wanted: Wanted) -> _Fetched:
        """Return the examples of a batch."""
        if wanted.epoch != self._epoch:
            self._epoch = wanted.epoch
            tell_epoch(wanted.epoch, self.dataset)
        return _Fetched(without_end(self._fetch, wanted), wanted)

    @INTERRUPTS.uninterrupted
    def _fetch(self, wanted: Wanted) -> Any:
        with intra_op_threads(1):  # as in a worker process: a sum could differ by a bit
            if not self._draws:
                fetch = functools.partial(_fetch, self.dataset, wanted.index, self._is_batched)
                examples, is_quiet = drew_nothing(self._generators_here(), fetch)
                if is_quiet:
                    return examples
                self._draws = True
            if not self._is_batched:
                return self._seeded(wanted, 0, wanted.index)
            return [
                self._seeded(wanted, place, index)
                for place, index in enumerate(wanted.index, wanted.first)
            ]

    def _seeded(self, wanted: Wanted, place: int, index: Any) -> Any:
        numbers = Lent(self._generators_here())
        numbers.seed(derive_seed("example", self._seed, wanted.epoch, wanted.step, place))
        if not self._is_batched or not _fetches_lists(self.dataset):
            return numbers.call(self.dataset.__getitem__, index)
        (example,) = numbers.call(self.dataset.__getitems__, [index])
        return example

    def _generators_here(self) -> tuple[Generator, ...]:
        if self._generators is None:
            self._generators = generators_of(self.dataset)
        return self._generators

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process gets: it finds the generators of its own copy."""
        return {**vars(self), "_generators": None}


class Collate:
    """A `collate_fn` that draws from generators seeded for the batch."""

    def __init__(self, collate: Callable[[Any], Any], seed: int) -> None:
        self._collate = collate
        self._seed = seed

    def __call__(self, fetched: _Fetched) -> Any:
        """Return the batch that the user's function makes of the examples."""
        examples, wanted = fetched
        if self._collate is default_collate or self._collate is default_convert:
            return self._collate(examples)
        numbers = Lent(generators_of(self._collate))
        numbers.seed(derive_seed("collate", self._seed, wanted.epoch, wanted.step))
        with intra_op_threads(1):
            return numbers.call(without_end, self._collate, examples)


class Start:
    """A `worker_init_fn` that shows the user's code the user's data set."""

    def __init__(self, start: Callable[[int], None] | None) -> None:
        self._start = start

    def __call__(self, worker: int) -> None:
        """Call the user's function at the start of a worker process."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses to be changed
        if self._start is not None:
            self._start(worker)


def _fetch(dataset: Any, index: Any, is_batched: bool) -> Any:
    """Fetch what torch's own fetcher would."""
    if not is_batched:
        return dataset[index]
    return dataset.__getitems__(index) if _fetches_lists(dataset) else [dataset[i] for i in index]


def _fetches_lists(dataset: Any) -> bool:
    return bool(getattr(dataset, "__getitems__", None))
