"""Batches of torch's `DataLoader` over a map-style data set, from any place in an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from evenstep.batch import Batch, Part
from evenstep.batch.cut import without_examples
from evenstep.batch.seeds import derive_seed
from evenstep.data.digests import digest_of_index
from evenstep.data.fetching import Collate, Examples, Start, Wanted, digest_of_examples
from evenstep.data.generators import order_of, samplers_in
from evenstep.data.order import Cursor, LoaderPlace
from evenstep.data.workers import end_workers
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
    has_lists = not isinstance(loader.dataset, IterableDataset)
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
        self._is_repeatable = False  # its order
        self._is_compared = False  # its first batch
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

    @property
    def last_examples(self) -> int | None:
        """The number of examples in an epoch's last batch; None if it is unknown."""
        batches = self.loader.batch_sampler
        if type(batches) is not BatchSampler:
            return None
        try:
            examples = len(batches.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        size = batches.batch_size
        return size if batches.drop_last else examples % size or min(size, examples) or None

    def data(self) -> dict[str, object]:
        """Return what the batches of every epoch depend on, besides the data set's contents."""
        length = getattr(self.loader.dataset, "__len__", None)
        return {
            "the kind of loader": "map-style",
            "the data set": type(self.loader.dataset).__name__,
            "its examples": length() if length else None,
        }

    def digest_of_examples(self) -> int | None:
        """Return a checksum of the first examples of epoch 0; None if there are none.

        They are fetched twice, by one worker process if the loader has some.
        """
        self._refuse_unseeded_order(0)
        first = [*itertools.islice(self._order(0), 1)]
        if not first:
            return None
        return digest_of_examples(self._examples(compares=True), first[0], **self._workers(1))

    def facts(self, cursor: Cursor) -> dict[str, object]:
        """Return what the batches of an epoch depend on besides."""
        self._refuse_unseeded_order(cursor.epoch)
        first = [*itertools.islice(self._order(cursor.epoch), _FIRST)]
        return {"a digest of the order of its first batches": digest_of_index(first)}

    def open(self, cursor: Cursor, saved: LoaderPlace | None) -> str:
        """Go to a batch of an epoch; return how, in words. The batches before are not fetched.

        Raises:
            CheckpointError: the order is not that of the training that was saved.
            InputError: the order can't be repeated, or has fewer batches.
        """
        self._refuse_unseeded_order(cursor.epoch)
        self._first = cursor.step
        self._digests = {0: 0}
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
        end_workers(getattr(fetcher, "_iterator", None))

    # ---- the order

    def _order(self, epoch: int) -> Iterator[Any]:
        """Draw what the sampler gives for each batch of an epoch."""
        return order_of(self._samplers[0], self._seed, epoch, self.loader.generator)

    def _numbered(self, epoch: int) -> Iterator[Wanted]:
        """Yield the batches of an epoch, and keep a checksum of those before each."""
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
            for batch in batches:
                self._is_compared = True
                yield batch
        finally:
            if not fetcher.persistent_workers:
                end_workers(batches)

    def _new_fetcher(self) -> DataLoader[Any]:
        """Return a loader like the user's that fetches what `_feed` says."""
        loader, workers = self.loader, self._workers(MOST_FETCHED_FIRST)
        if workers:
            ahead = MOST_FETCHED_FIRST // workers["num_workers"]
            workers["prefetch_factor"] = max(1, min(loader.prefetch_factor or 2, ahead))
            workers["persistent_workers"] = loader.persistent_workers
        seed = derive_seed("workers", self._seed)
        collate: Any = Collate(loader.collate_fn, self._seed)
        return DataLoader(
            self._examples(compares=not self._is_compared),
            batch_sampler=self._feed,
            collate_fn=collate,
            pin_memory=loader.pin_memory,
            generator=torch.Generator().manual_seed(seed),  # else it draws from the default one
            **workers,
        )

    def _examples(self, *, compares: bool) -> Examples:
        return Examples(
            self.loader.dataset,
            self._seed,
            is_batched=self.loader.batch_sampler is not None,
            by_index=False,
            compares=compares,
        )

    def _workers(self, most: int) -> dict[str, Any]:
        """Return the arguments of a loader with at most so many of the user's worker processes."""
        loader = self.loader
        if not loader.num_workers:
            return {}
        return {
            "num_workers": min(loader.num_workers, most),
            "worker_init_fn": Start(loader.worker_init_fn),
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
        }


class _Feed:
    """Stands for a batch sampler: gives what to fetch in the current epoch."""

    def __init__(self) -> None:
        self.wanted: Iterator[Wanted] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.wanted


def _has_state(part: object) -> bool:
    is_known = type(part) in _WITHOUT_STATE or type(part).__module__.startswith("torchdata.")
    return not is_known and callable(getattr(part, "state_dict", None))


def is_torchdatas(loader: object) -> bool:
    """Whether `loader` is torchdata's `StatefulDataLoader`."""
    kind = type(loader)
    return kind.__module__.startswith("torchdata.") and kind.__name__ == "StatefulDataLoader"
