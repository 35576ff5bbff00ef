"""Batches of a map-style data set, which are the same in any process and from any place on.

`Fetcher` gives a torch `DataLoader` what to fetch. `Examples`, `Collate` and `Start` stand for the
user's data set, `collate_fn` and `worker_init_fn` in it.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert, get_worker_info

from evenstep.batch import Batch, Part
from evenstep.batch.assignment import MOST_AHEAD
from evenstep.batch.cut import without_examples
from evenstep.batch.seeds import derive_seed
from evenstep.data.digests import digest_of_batch
from evenstep.data.generators import (
    Generator,
    call_seeded,
    drew_nothing,
    generators_of,
    order_of,
    samplers_of,
    set_epoch_of,
)
from evenstep.data.workers import let_generators_pass
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import InputError, shown
from evenstep.private_torch.loaders import end_kept_workers, end_workers

T = TypeVar("T")

PartOf: TypeAlias = Callable[[int, int], Part]
"""Returns this process's part of a batch, given its number in the epoch and its size."""

COMPARED = 4
"""Examples of an epoch's first batch that stand for a data set."""


class Wanted(NamedTuple):
    """A batch, or the part of one that a process computes, to be fetched.

    `index` is what the loader's batch sampler (or, without batches, its sampler) gave; `first` is
    the place of its first example in the whole batch.
    """

    epoch: int
    step: int
    first: int
    index: Any


class _Fetched(NamedTuple):
    """The examples of a batch, before they are collated."""

    examples: Any
    wanted: Wanted


class Fetcher:
    """Fetches the batches of a map-style data set, whole or in parts, from any place in an epoch.

    The order is drawn from the loader's samplers, with all generators seeded by (seed, epoch).
    Examples, and the `collate_fn` of every batch, draw from seeded generators, too. So batches do
    not depend on the number of workers, on where an epoch was resumed, or on the process that
    fetches them.

    The loader itself is never iterated. `by_index` is as for `Examples`.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, *, by_index: bool = False) -> None:
        self.loader = loader
        self.samplers = samplers_of(loader)
        self._seed = seed
        is_batched = loader.batch_sampler is not None
        self._examples = functools.partial(
            Examples, loader.dataset, seed, is_batched=is_batched, by_index=by_index
        )
        self._is_compared = False  # the first batch that was fetched
        self._kept: dict[bool, DataLoader[Any]] = {}  # for parts or not: workers that stay

    def wanted(self, epoch: int) -> Iterator[Wanted]:
        """Draw the order of an epoch; yield all its batches, not yet fetched.

        The loader and the data set are told the epoch at once: its length may depend on it, and
        worker processes get the data set as it is when they start.
        """
        set_epoch_of(epoch, self.loader, self.loader.dataset)
        return self._drawn(epoch)

    def _drawn(self, epoch: int) -> Iterator[Wanted]:
        order = order_of(self.samplers[0], self._seed, epoch, self.loader.generator)
        for step, index in enumerate(order):
            yield Wanted(epoch, step, 0, index)

    def batches(self, wanted: Iterator[Wanted], part: PartOf | None) -> Iterator[Batch]:
        """Fetch batches, or this process's part of each; nothing is started before the first."""
        return self._fetched(wanted) if part is None else self._parts(wanted, part)

    def digest_of_examples(self) -> int | None:
        """Return a checksum of the first examples of epoch 0; None if there are none.

        They are fetched twice, by one worker process if the loader has some.

        Raises:
            InputError: they are others when they are fetched again.
        """
        first = next(self.wanted(0), None)
        if first is None:
            return None
        index = first.index
        some = index[:COMPARED] if isinstance(index, list | tuple) else index
        (digest,) = self._loader([first._replace(index=some)], _digest, most=1, compares=True)
        return int(digest)

    def close(self) -> None:
        """End worker processes that were kept from epoch to epoch."""
        while self._kept:
            end_kept_workers(self._kept.popitem()[1])

    # ---- the parts of the above

    def _parts(self, wanted: Iterator[Wanted], part: PartOf) -> Iterator[Batch]:
        """Yield parts of batches. An empty part is an example of the batch, cut to length 0."""
        empty: deque[int | None] = deque()  # the dimension to be cut, of batches fetched ahead

        def parts() -> Iterator[Wanted]:
            for one in wanted:
                index = [*one.index]
                own = part(one.step, len(index))
                mine = index[own.own]
                empty.append(None if mine else own.dim)
                yield one._replace(first=own.own.start or 0, index=mine or index[:1])

        for batch in self._fetched(parts(), of_parts=True):
            dim = empty.popleft()
            yield batch if dim is None else without_examples(batch, dim)

    def _fetched(self, wanted: Iterator[Wanted], *, of_parts: bool = False) -> Iterator[Batch]:
        loader = self._kept.get(of_parts)
        if loader is None:
            loader = self._loader(
                _Feed(),
                Collate(self.loader.collate_fn, self._seed, of_parts=of_parts),
                most=MOST_AHEAD if of_parts else sys.maxsize,
                compares=not self._is_compared,
                pin_memory=self.loader.pin_memory,
                persistent_workers=self.loader.persistent_workers,
            )
        if loader.persistent_workers:
            self._kept[of_parts] = loader
        feed: Any = loader.batch_sampler
        feed.wanted = wanted
        batches: Any = iter(loader)
        try:
            for batch in batches:
                self._is_compared = True
                yield batch
        finally:
            if not loader.persistent_workers:
                end_workers(batches)

    def _loader(
        self, feed: Any, collate: Any, *, most: int, compares: bool, **options: Any
    ) -> DataLoader[Any]:
        """Return a loader that fetches what `feed` says, with the user's worker settings.

        `feed` yields what is `Wanted`. There are at most `most` worker processes, and as many
        batches that they fetch ahead; `compares` is as for `Examples`.
        """
        given = self.loader
        if given.num_workers:
            let_generators_pass()
            workers = min(given.num_workers, most)
            options |= {
                "num_workers": workers,
                "worker_init_fn": Start(given.worker_init_fn),
                "multiprocessing_context": given.multiprocessing_context,
                "timeout": given.timeout,
                "prefetch_factor": max(1, min(given.prefetch_factor or 2, most // workers)),
            }
        # Without a generator, a DataLoader draws from the global one.
        generator = torch.Generator().manual_seed(derive_seed("workers", self._seed))
        return DataLoader(
            self._examples(compares=compares),
            batch_sampler=feed,
            collate_fn=collate,
            generator=generator,
            **options,
        )


class _Feed:
    """Stands for a batch sampler: gives what to fetch in the current epoch."""

    wanted: Iterator[Wanted]

    def __iter__(self) -> Iterator[Any]:
        return self.wanted


class _Drawing:
    """User code that may draw from generators, which each process finds in its own copy."""

    _generators: tuple[Generator, ...] | None = None

    def _generators_of(self, owner: object) -> tuple[Generator, ...]:
        if self._generators is None:
            self._generators = generators_of(owner)
        return self._generators

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process gets."""
        return {**vars(self), "_generators": None}


class Examples(_Drawing, Dataset[Any]):
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
            if first != digest_of_batch(examples):
                raise InputError(
                    f"{type(self.dataset).__name__} gave other examples when batch {wanted.step} "
                    f"of epoch {wanted.epoch} was fetched again with the same random numbers: it "
                    f"draws from a generator that evenstep can't find and seed, such as one at "
                    f"module level or one that it makes later, or it changes its examples in "
                    f"place. So they would depend on worker processes, and differ after a resume. "
                    f"Let it draw from the default generators of torch, Python or numpy, or from a "
                    f"generator that is an attribute from the start"
                )
            self._compares = False
        return _Fetched(examples, wanted)

    @INTERRUPTS.uninterrupted
    def _fetch(self, wanted: Wanted) -> Any:
        with intra_op_threads(1):  # as in a worker process: a sum could differ by a bit
            if not self._draws:
                fetch = functools.partial(_fetch, self.dataset, wanted.index, self._is_batched)
                examples, is_quiet = drew_nothing(self._generators_of(self.dataset), fetch)
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
        generators = self._generators_of(self.dataset)
        if not self._is_batched or not _fetches_lists(self.dataset):
            return call_seeded(generators, seed, self.dataset.__getitem__, index)
        (example,) = call_seeded(generators, seed, self.dataset.__getitems__, [index])
        return example


class Collate(_Drawing):
    """A `collate_fn` that draws from generators seeded for the batch.

    Of parts of batches, it must not draw.
    """

    def __init__(self, collate: Callable[[Any], Any], seed: int, *, of_parts: bool = False) -> None:
        self._collate = collate
        self._seed = seed
        self._of_parts = of_parts

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
        generators = self._generators_of(self._collate)
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
