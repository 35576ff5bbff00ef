"""Batches of torch's `DataLoader` over a map-style data set, from any place in an epoch."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)

from evenstep.batch import Batch, Part
from evenstep.batch.cut import without_examples
from evenstep.batch.rng import derive_seed
from evenstep.data.generators import (
    Generator,
    Lent,
    drew_nothing,
    generators_of,
    order_of,
    samplers_in,
    tell_epoch,
)
from evenstep.data.order import Cursor, LoaderPlace
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import CheckpointError, InputError

_FIRST = 64  # batches of an epoch whose order is compared
_REMEMBERED = 4096  # batches: more than may be in flight, or fetched ahead

MOST_FETCHED_FIRST = 24
"""Batches. Parts of batches are fixed for a limited number of batches only (`batch.assignment`)."""

_WITHOUT_STATE = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


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


def is_map_style(loader: object) -> bool:
    """Whether the batches of `loader` are known by its samplers, data set and `collate_fn` alone.

    A data set or a sampler with a state of its own is not: the loader's state has it, if any.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, MapDataPipe):
        return False
    kind = type(loader)
    is_plain = (kind.__iter__, kind._get_iterator) == (
        DataLoader.__iter__,
        DataLoader._get_iterator,
    )
    is_plain = is_plain or is_torchdatas(loader)
    has_lists = loader._dataset_kind == 0
    parts = [loader.dataset, *samplers_of(loader)]
    return is_plain and has_lists and not any(map(_has_state, parts))


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a loader, the outermost first."""
    return samplers_in(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


class MapStyle:
    """The batches of a map-style `DataLoader`.

    The order is drawn from the loader's own samplers, with all generators seeded by (seed, epoch).
    Every example, and the `collate_fn` of every batch, draws from generators that are seeded by
    (seed, epoch, batch, place in the batch). So batches do not depend on the number of workers, on
    where an epoch was resumed, or on the process that fetches them.

    Args:
        loader: the loader; its data set, samplers, `collate_fn` and workers are used.
        seed: the seed of the training.

    Attributes:
        fetches_parts: whether a process can fetch the examples of its own shards alone: only
            torch's own `default_collate` is known to give the same rows then.
    """

    draws_in: int | None = None

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.loader = loader
        self._seed = seed
        self._samplers = samplers_of(loader)
        self._feed = _Feed()
        self._fetcher: DataLoader[Any] | None = None
        self._is_repeatable = False
        self._digests: dict[int, int] = {}
        self._wanted: Iterator[Wanted] = iter(())
        self._first = 0
        self.fetches_parts = (
            loader.batch_sampler is not None and loader.collate_fn is default_collate
        )
        self.whole_because = (
            "its collate_fn may pad or mix the examples of a whole batch"
            if loader.batch_sampler is not None
            else "it has no batch sampler"
        )

    def facts(self, cursor: Cursor) -> dict[str, object]:
        """Return what the batches depend on, to compare it between processes."""
        length = getattr(self.loader.dataset, "__len__", None)
        self._refuse_unseeded_order(cursor.epoch)
        first = [*itertools.islice(self._order(cursor.epoch), _FIRST)]
        return {
            "the data set": type(self.loader.dataset).__name__,
            "its examples": length() if length else None,
            "a digest of the order of its first batches": digest_of_index(first),
        }

    def open(self, cursor: Cursor, saved: LoaderPlace | None) -> str:
        """Go to a batch of an epoch; return how, in words. The batches before are not fetched.

        Raises:
            CheckpointError: the order is not that of the training that was saved.
            InputError: the order can't be repeated, or has fewer batches.
        """
        self._refuse_unseeded_order(cursor.epoch)
        self._first = cursor.step
        self._wanted = self._numbered(cursor.epoch)
        skipped = sum(1 for _ in itertools.islice(self._wanted, cursor.step))
        if skipped < cursor.step:
            raise InputError(
                f"{type(self.loader).__name__} has {skipped} batches in epoch {cursor.epoch}, but "
                f"training is at batch {cursor.step}: give the loader and the data set that "
                f"training started with"
            )
        then = None if saved is None else saved.digest
        if then is not None and then != self._digests[cursor.step]:
            raise CheckpointError(
                f"the sampler of the {type(self.loader).__name__} gives other batches in epoch "
                f"{cursor.epoch} than in the training that was saved: give the loader, the data "
                f"set and the seed that training started with"
            )
        return f"{skipped} batches drawn from the sampler, and not fetched"

    def batches(self, part: Callable[[int, int], Part] | None) -> Iterator[Batch]:
        """Yield the batches from the opened place on, or this process's part of each."""
        if part is None:
            yield from self._fetched(self._wanted)
            return
        empty: dict[int, int] = {}
        parts = self._parts(self._wanted, part, empty)
        for step, batch in enumerate(self._fetched(parts), self._first):
            yield without_examples(batch, empty[step]) if step in empty else batch

    def snapshot_at(self, step: int, *, is_here: bool) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state: nothing."""
        return {}

    def snapshot_behind(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state after an epoch: nothing."""
        return {}

    def digest_before(self, step: int) -> int | None:
        """Return a checksum of the batches before batch `step` of the epoch; None if unknown."""
        return self._digests.get(step)

    def close(self) -> None:
        """End worker processes that were kept from epoch to epoch."""
        fetcher, self._fetcher = self._fetcher, None
        iterator: Any = getattr(fetcher, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()

    # ---- the order

    def _order(self, epoch: int) -> Iterator[Any]:
        """Draw what the sampler gives for each batch of an epoch."""
        return order_of(self._samplers[0], self._seed, epoch, self.loader.generator)

    def _numbered(self, epoch: int) -> Iterator[Wanted]:
        """Yield the batches of an epoch, and keep a checksum of those before each."""
        self._digests = {0: 0}
        digest = 0
        for step, index in enumerate(self._order(epoch)):
            digest = digest_of_index(index, digest)
            self._digests[step + 1] = digest
            self._digests.pop(step - _REMEMBERED, None)
            yield Wanted(epoch, step, 0, index)

    def _refuse_unseeded_order(self, epoch: int) -> None:
        """Draw the first batches of an epoch twice, once in a training."""
        if self._is_repeatable:
            return
        first, second = (
            digest_of_index([*itertools.islice(self._order(epoch), _FIRST)]) for _ in range(2)
        )
        if first != second:
            names = " in ".join(type(one).__name__ for one in reversed(self._samplers))
            raise InputError(
                f"the sampler of the {type(self.loader).__name__}, {names}, gave two orders for "
                f"epoch {epoch}: it draws from a generator that evenstep can't seed, or changes "
                f"its order each time it is iterated, so the order could not be repeated after a "
                f"resume. Let it draw from torch's default generator or from one in an attribute "
                f"`generator`, or let the order depend on `set_epoch(epoch)`"
            )
        self._is_repeatable = True

    def _parts(
        self,
        wanted: Iterable[Wanted],
        part: Callable[[int, int], Part],
        empty: dict[int, int],
    ) -> Iterator[Wanted]:
        """Yield the part of each batch; instead of an empty one, its first example."""
        for one in wanted:
            index = [*one.index]
            own = part(one.step, len(index))
            mine = index[own.own]
            if not mine:
                empty[one.step] = own.dim
            yield one._replace(first=own.own.start or 0, index=mine or index[:1])

    # ---- the examples

    def _fetched(self, wanted: Iterator[Wanted]) -> Iterator[Batch]:
        fetcher = self._new_fetcher() if self._fetcher is None else self._fetcher
        self._fetcher = fetcher if fetcher.persistent_workers else None
        self._feed.wanted = wanted
        batches: Any = iter(fetcher)
        try:
            yield from batches
        finally:
            if fetcher.num_workers and not fetcher.persistent_workers:
                # Its `__del__` does this too, but not while a traceback holds it.
                batches._shutdown_workers()

    def _new_fetcher(self) -> DataLoader[Any]:
        """Return a loader like the user's that fetches what `_feed` says."""
        loader = self.loader
        workers: dict[str, Any] = {}
        if loader.num_workers:
            ahead = MOST_FETCHED_FIRST // min(loader.num_workers, MOST_FETCHED_FIRST)
            workers = {
                "num_workers": min(loader.num_workers, MOST_FETCHED_FIRST),
                "prefetch_factor": max(1, min(loader.prefetch_factor or 2, ahead)),
                "worker_init_fn": _Start(loader.worker_init_fn),
                "multiprocessing_context": loader.multiprocessing_context,
                "persistent_workers": loader.persistent_workers,
                "timeout": loader.timeout,
            }
        is_batched = loader.batch_sampler is not None
        seed = derive_seed("workers", self._seed)
        collate: Any = _Collate(loader.collate_fn, self._seed)
        return DataLoader(
            _Examples(loader.dataset, self._seed, is_batched),
            batch_sampler=self._feed,
            collate_fn=collate,
            pin_memory=loader.pin_memory,
            generator=torch.Generator().manual_seed(seed),  # else it draws from the default one
            **workers,
        )


class _Feed:
    """Stands for a batch sampler: gives what to fetch in the current epoch."""

    def __init__(self) -> None:
        self.wanted: Iterator[Wanted] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.wanted


class _Examples(Dataset[Any]):
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
        return _Fetched(self._fetch(wanted), wanted)

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


class _Collate:
    """A `collate_fn` that draws from generators seeded for the batch."""

    def __init__(self, collate: Callable[[Any], Any], seed: int) -> None:
        self._collate = collate
        self._seed = seed

    def __call__(self, fetched: _Fetched) -> Any:
        examples, wanted = fetched
        if self._collate is default_collate or self._collate is default_convert:
            return self._collate(examples)
        numbers = Lent(generators_of(self._collate))
        numbers.seed(derive_seed("collate", self._seed, wanted.epoch, wanted.step))
        with intra_op_threads(1):
            return numbers.call(self._collate, examples)


class _Start:
    """A `worker_init_fn` that shows the user's code the user's data set."""

    def __init__(self, start: Callable[[int], None] | None) -> None:
        self._start = start

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses to be changed
        if self._start is not None:
            self._start(worker)


# ---- functions that have no state


def digest_of_index(index: Any, before: int = 0) -> int:
    """Return a checksum of what a sampler gave, after what has the checksum `before`."""
    return zlib.crc32(repr(_as_lists(index)).encode(), before)


def _as_lists(index: Any) -> Any:
    if isinstance(index, list | tuple):
        return [*map(_as_lists, index)]
    return index.tolist() if hasattr(index, "tolist") else index


def _fetch(dataset: Any, index: Any, is_batched: bool) -> Any:
    """Fetch what torch's own fetcher would."""
    if not is_batched:
        return dataset[index]
    return dataset.__getitems__(index) if _fetches_lists(dataset) else [dataset[i] for i in index]


def _fetches_lists(dataset: Any) -> bool:
    return bool(getattr(dataset, "__getitems__", None))


def _has_state(part: object) -> bool:
    is_known = type(part) in _WITHOUT_STATE or type(part).__module__.startswith("torchdata.")
    return not is_known and callable(getattr(part, "state_dict", None))


def is_torchdatas(loader: object) -> bool:
    """Whether `loader` is torchdata's `StatefulDataLoader`."""
    kind = type(loader)
    return kind.__module__.startswith("torchdata.") and kind.__name__ == "StatefulDataLoader"
