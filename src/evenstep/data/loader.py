"""Loads batches of a data set, starting at any step of any epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from evenstep.batch import Batch, Part
from evenstep.batch.cut import without_examples
from evenstep.batch.seeds import derive_seed
from evenstep.data.digests import digest_of_batch
from evenstep.data.fetching import COMPARED, Collate, Examples, Wanted, digest_of_examples
from evenstep.data.generators import order_of
from evenstep.data.order import Cursor, epoch_order
from evenstep.data.workers import end_workers
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import DataError, InputError, hides_own_frames, shown
from evenstep.limits import MOST_EXAMPLES

PartOf: TypeAlias = "Callable[[int, int], Part]"
"""Returns this process's part of a batch, given its number in the epoch and its size."""

T = TypeVar("T")

_MOST_WORKERS = 1024

MOST_WORKERS_FOR_PARTS = 12
"""A worker fetches two batches ahead, and parts are fixed for a limited number of batches only
(`batch.assignment`)."""


class Loader:
    """Cuts each epoch of a data set into batches.

    The batches depend only on (dataset, batch_size, seed, shuffle, drop_last, epoch): they are the
    same for any number of workers, and after starting in the middle of an epoch. The global random
    generators are not changed.

        for batch in loader.epoch(Cursor(epoch=2, step=3)): ...
    """

    @hides_own_frames
    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        collate: Callable[[list[Any]], Batch] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        sampler: Iterable[int] | None = None,
    ) -> None:
        """Check the arguments. Nothing is read or started.

        Args:
            dataset: a map-style data set. A `TensorDataset` is indexed directly and yields tuples
                of tensors; the examples of others are collated by torch's `DataLoader`.
            batch_size: number of examples in a batch.
            seed: seed of the order and of random augmentation.
            shuffle: visit the examples in `epoch_order`, otherwise in the order of the data set.
            drop_last: drop the last batch of an epoch if it is short; otherwise train on it.
            workers: number of processes that fetch examples; 0: the calling thread fetches them.
                Not used for a `TensorDataset`, which computes nothing. At most 12 for each process
                when several processes train together.
            collate: makes a batch from a list of examples; it may stack them along a dimension
                other than the first (`batch_dim`), and mark tensors with `evenstep.shared`. None:
                as torch's `DataLoader` does. With several processes it gets a part of a batch, and
                must not draw random numbers.
            num_workers: torch's name for `workers`.
            collate_fn: torch's name for `collate`.
            sampler: yields the indices of an epoch's examples, instead of `shuffle`; it needs a
                length. The generators that it draws from are seeded by (seed, epoch), as in
                `Trainer.epoch`. An example that it yields twice is augmented identically.

        Raises:
            DataError: the data set has no length, or no examples.
            InputError: the batch size or the number of workers is too small.
        """
        for name, value, least, most in (
            ("batch_size", batch_size, 1, MOST_EXAMPLES),
            ("workers", workers, 0, _MOST_WORKERS),
            ("num_workers", num_workers, 0, _MOST_WORKERS),
        ):
            if not isinstance(value, int) or not least <= value <= most:
                raise InputError(
                    f"got {name}={shown(value)}: give an integer from {least} to {most}"
                )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.workers = _either("workers", workers, "num_workers", num_workers)
        self.collate = _either("collate", collate, "collate_fn", collate_fn)
        self.sampler = sampler
        self._is_compared = False  # the first batch that was fetched
        self.examples = _count(dataset) if sampler is None else _count_drawn(sampler)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        full, rest = divmod(self.examples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def epoch_examples(self) -> int:
        """The number of examples that an epoch visits."""
        return min(self.examples, len(self) * self.batch_size)

    @property
    def last_examples(self) -> int:
        """The number of examples in an epoch's last batch."""
        return self.epoch_examples - (len(self) - 1) * self.batch_size

    def facts(self) -> dict[str, object]:
        """Return what the batches of every epoch depend on, besides the data set's contents."""
        facts: dict[str, object] = {
            "the data set": type(self.dataset).__name__,
            "its examples": self.examples,
            "batch_size": self.batch_size,
            "the seed of the order": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
        if self.sampler is not None:
            facts["the sampler"] = type(self.sampler).__name__
        return facts

    def digest_of_examples(self) -> int:
        """Return a checksum of some examples.

        Of a `TensorDataset` these are about 64, evenly spaced; of others the first ones of epoch 0,
        which are fetched twice, by one worker process if the loader has some.
        """
        if _is_indexable(self.dataset):
            count = len(self.dataset)
            some = torch.arange(0, count, max(1, count // 64))
            return digest_of_batch(_rows(self.dataset.tensors, some))
        first = self._order(0)[:COMPARED].tolist()
        examples = self._examples(compares=True)
        return digest_of_examples(examples, first, num_workers=min(1, self.workers))

    def _examples(self, *, compares: bool) -> Examples:
        return Examples(self.dataset, self.seed, is_batched=True, by_index=True, compares=compares)

    def drawn_order(self, epoch: int) -> list[int] | None:
        """Return the order that the sampler draws for an epoch; None without a sampler."""
        return None if self.sampler is None else self._order(epoch).tolist()

    def in_order(self) -> Loader:
        """Return a loader of the same data set that visits all examples without shuffling."""
        return Loader(
            self.dataset,
            self.batch_size,
            seed=self.seed,
            shuffle=False,
            workers=self.workers,
            collate=self.collate,
        )

    def size_of(self, step: int) -> int:
        """Return the number of examples in batch `step` of an epoch."""
        return min(self.batch_size, self.examples - step * self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of epoch 0."""
        return self.epoch(Cursor())

    def epoch(self, cursor: Cursor, part: PartOf | None = None) -> Iterator[Batch]:
        """Yield the batches of `cursor.epoch`, starting with batch `cursor.step`.

        Args:
            cursor: the position to start at; at the end of an epoch, nothing is yielded.
            part: returns the part of each batch to fetch and yield; None: all of it. With workers
                it is called some batches ahead.

        Raises:
            InputError: `cursor.step` is beyond the end of the epoch.
        """
        if cursor.step > len(self):
            raise InputError(
                f"got {cursor}, but an epoch has {len(self)} batches "
                f"({self.examples} examples, {self.batch_size} a batch): use the data set and the "
                f"batch size that the position belongs to"
            )
        end = len(self) * self.batch_size
        rest = self._order(cursor.epoch)[cursor.step * self.batch_size : end]
        indices = [*rest.split(self.batch_size)] if len(rest) else []
        if part is None:
            return self._batches(cursor, indices, of_parts=False)
        return self._parts(cursor, indices, part)

    def _order(self, epoch: int) -> torch.Tensor:
        if self.sampler is not None:
            order = [*order_of(self.sampler, self.seed, epoch)]
            if len(order) != self.examples:
                raise InputError(
                    f"{type(self.sampler).__name__} gave {len(order)} examples in epoch {epoch}, "
                    f"but its length is {self.examples}: the two must be equal"
                )
            return torch.tensor(order, dtype=torch.int64)
        if self.shuffle:
            return epoch_order(self.examples, self.seed, epoch)
        return torch.arange(self.examples)

    def _batches(
        self, cursor: Cursor, indices: Iterable[torch.Tensor], *, of_parts: bool
    ) -> Iterator[Batch]:
        if _is_indexable(self.dataset) and self.collate is None:
            for index in indices:
                yield _rows(self.dataset.tensors, index)
        else:
            wanted = (
                Wanted(cursor.epoch, step, 0, index.tolist())
                for step, index in enumerate(indices, cursor.step)
            )
            yield from self._fetched(cursor.epoch, wanted, of_parts)

    def _parts(self, cursor: Cursor, indices: list[torch.Tensor], part: PartOf) -> Iterator[Batch]:
        """Yield parts of batches. An empty part is an example of the batch, cut to length 0."""
        empty: dict[int, int] = {}

        def own() -> Iterator[torch.Tensor]:
            for number, index in enumerate(indices, cursor.step):
                own_part = part(number, len(index))
                mine = index[own_part.own]
                if not len(mine):
                    empty[number] = own_part.dim
                yield mine if len(mine) else index[:1]

        for number, batch in enumerate(self._batches(cursor, own(), of_parts=True), cursor.step):
            if number in empty:
                batch = without_examples(batch, empty[number])
            yield batch

    def _fetched(self, epoch: int, wanted: Iterator[Wanted], of_parts: bool) -> Iterator[Batch]:
        workers = min(self.workers, MOST_WORKERS_FOR_PARTS) if of_parts else self.workers
        collate: Any = Collate(self.collate or default_collate, self.seed, of_parts=of_parts)
        batches: Any = iter(
            DataLoader(
                self._examples(compares=not self._is_compared),
                batch_sampler=wanted,  # type: ignore[arg-type]
                num_workers=workers,
                collate_fn=collate,
                # Without a generator, a DataLoader draws from the global one.
                generator=torch.Generator().manual_seed(derive_seed("workers", self.seed, epoch)),
            )
        )
        try:
            for batch in batches:
                self._is_compared = True
                yield batch
        finally:
            end_workers(batches)


@INTERRUPTS.uninterrupted
def _rows(tensors: Sequence[torch.Tensor], index: torch.Tensor) -> Batch:
    """Copy some examples with one intra-op thread, because more would compete with the lanes.

    (Measured with an MLP on two CPU devices: 3 to 11 ms with two threads, 0.02 ms with one.)
    """
    with intra_op_threads(1):
        return tuple(tensor.index_select(0, index.to(tensor.device)) for tensor in tensors)


def _count(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, tuple | list) and {torch.Tensor}.issuperset(map(type, dataset)):
        raise DataError(
            f"got a {type(dataset).__name__} of {len(dataset)} tensors as a data set, so each of "
            f"them would be an example: give torch.utils.data.TensorDataset(X, y)"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} is not a map-style data set (one with a length and an "
            f"index, so that its order can be repeated): iterate it yourself and call trainer.step"
        )
    if len(dataset) == 0:
        raise DataError(f"{type(dataset).__name__} has 0 examples: at least 1 is needed")
    return len(dataset)


def _count_drawn(sampler: Any) -> int:
    """Return the length of a sampler, which must not be cut for several processes."""
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise InputError(
            f"got sampler={type(sampler).__name__} for {sampler.num_replicas} processes: evenstep "
            f"cuts each batch for the processes itself, so use shuffle={sampler.shuffle} instead"
        )
    if not hasattr(sampler, "__len__") or not hasattr(sampler, "__iter__"):
        raise InputError(
            f"got sampler={shown(sampler)}: give an iterable of numbers that has a length, such "
            f"as torch.utils.data.WeightedRandomSampler(...)"
        )
    if len(sampler) == 0:
        raise DataError(f"{type(sampler).__name__} gives 0 examples: at least 1 is needed")
    return len(sampler)


def _either(name: str, value: T, other_name: str, other: T) -> T:
    """Return the value of an argument that has two names."""
    if value and other:
        raise InputError(
            f"got {name}={shown(value)} and {other_name}={shown(other)}, two names of the same "
            f"argument: give only one"
        )
    return value or other


def _is_indexable(dataset: Dataset[Any]) -> TypeGuard[TensorDataset]:
    """Whether examples are just rows of tensors (a subclass may compute them)."""
    return (
        isinstance(dataset, TensorDataset)
        and type(dataset).__getitem__ is TensorDataset.__getitem__
    )
