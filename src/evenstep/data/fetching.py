"""Examples of a map-style data set, fetched so that they are the same in any worker process.

These classes stand for the user's data set, `collate_fn` and `worker_init_fn` in a `DataLoader`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from evenstep.batch.seeds import derive_seed
from evenstep.data.digests import digest_of_batch
from evenstep.data.generators import (
    Generator,
    call_seeded,
    drew_nothing,
    generators_of,
    set_epoch_of,
)
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import InputError, shown

T = TypeVar("T")

COMPARED = 4
"""Examples of an epoch's first batch that stand for a data set."""


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

    Args:
        dataset: the user's.
        seed: the seed of the training.
        is_batched: whether a batch is a list of examples.
        by_index: whether an example's seed follows from its index, and not from its place in a
            batch: an index that comes twice in an epoch gives the same example.
        compares: whether the first batch of each process is fetched twice, and compared.

    Most data sets draw nothing. So a batch is fetched at once, as torch does; from the first one
    that drew on, each example is fetched by itself, with the generators seeded for it.
    """

    def __init__(
        self, dataset: Any, seed: int, *, is_batched: bool, by_index: bool, compares: bool
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._is_batched = is_batched
        self._by_index = by_index
        self._compares = compares
        self._draws = by_index
        self._epoch: int | None = None
        self._generators: tuple[Generator, ...] | None = None

    def __getitems__(self, wanted: Wanted) -> _Fetched:
        """Return the examples of a batch.

        Raises:
            InputError: they are others when they are fetched again.
        """
        if wanted.epoch != self._epoch:
            self._epoch = wanted.epoch
            set_epoch_of(wanted.epoch, self.dataset)
        return without_end(self._fetched, wanted)

    def _fetched(self, wanted: Wanted) -> _Fetched:
        examples = self._fetch(wanted)
        if self._compares:
            first = digest_of_batch(examples)
            examples = self._fetch(wanted)
            self._refuse_others(first, digest_of_batch(examples), wanted)
            self._compares = False
        return _Fetched(examples, wanted)

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
        where = (index,) if self._by_index else (wanted.step, place)
        seed = derive_seed("example", self._seed, wanted.epoch, *where)
        generators = self._generators_here()
        if not self._is_batched or not _fetches_lists(self.dataset):
            return call_seeded(generators, seed, self.dataset.__getitem__, index)
        (example,) = call_seeded(generators, seed, self.dataset.__getitems__, [index])
        return example

    def _refuse_others(self, first: int, second: int, wanted: Wanted) -> None:
        if first != second:
            raise InputError(
                f"{type(self.dataset).__name__} gave other examples when batch {wanted.step} of "
                f"epoch {wanted.epoch} was fetched again with the same random numbers: it draws "
                f"from a generator that evenstep can't find and seed, such as one at module level "
                f"or one that it makes later, or it changes its examples in place. So they would "
                f"depend on worker processes, and differ after a resume. Let it draw from the "
                f"default generators of torch, Python or numpy, or from a generator that is an "
                f"attribute from the start"
            )

    def _generators_here(self) -> tuple[Generator, ...]:
        if self._generators is None:
            self._generators = generators_of(self.dataset)
        return self._generators

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process gets: it finds the generators of its own copy."""
        return {**vars(self), "_generators": None}


class Collate:
    """A `collate_fn` that draws from generators seeded for the batch.

    Args:
        collate: the user's, or torch's.
        seed: the seed of the training.
        of_parts: whether it gets parts of batches, for which it must not draw.
    """

    def __init__(self, collate: Callable[[Any], Any], seed: int, *, of_parts: bool = False) -> None:
        self._collate = collate
        self._seed = seed
        self._of_parts = of_parts
        self._generators: tuple[Generator, ...] | None = None

    def __call__(self, fetched: _Fetched) -> Any:
        """Return the batch that the user's function makes of the examples.

        Raises:
            InputError: it draws random numbers for a part of a batch.
        """
        return without_end(self._collated, fetched)

    def _collated(self, fetched: _Fetched) -> Any:
        examples, wanted = fetched
        if self._collate is default_collate or self._collate is default_convert:
            return self._collate(examples)
        if self._generators is None:
            self._generators = generators_of(self._collate)
        generators = self._generators
        seed = derive_seed("collate", self._seed, wanted.epoch, wanted.step)
        with intra_op_threads(1):
            if not self._of_parts:
                return call_seeded(generators, seed, self._collate, examples)
            collate = functools.partial(self._collate, examples)
            batch, is_quiet = drew_nothing(generators, collate)
        if not is_quiet:
            raise InputError(
                f"{shown(self._collate)} drew random numbers for a part of a batch, so they "
                f"would depend on the number of processes: give trainer.epoch a "
                f"torch.utils.data.DataLoader, of which it collates whole batches"
            )
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process gets: it finds the generators of its own copy."""
        return {**vars(self), "_generators": None}


def digest_of_examples(examples: Examples, index: Any, **workers: Any) -> int:
    """Return a checksum of the first examples of a batch of epoch 0, which stand for a data set.

    Args:
        examples: the data set; it compares what it fetches with what it fetches again.
        index: what the batch is made of.
        workers: the arguments of a `DataLoader` for worker processes, of which one is started.

    Raises:
        InputError: the examples are others when they are fetched again.
    """
    some = index[:COMPARED] if isinstance(index, list | tuple) else index
    generator = torch.Generator().manual_seed(0)  # else it draws from the default one
    options: Any = {"collate_fn": _digest, "generator": generator, **workers}
    wanted: Any = Wanted(0, 0, 0, some)
    (digest,) = DataLoader(examples, batch_sampler=[wanted], **options)
    return int(digest)


def _digest(fetched: _Fetched) -> int:
    return digest_of_batch(fetched.examples)


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
