"""Loads batches of a data set, starting at any step of any epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from evenstep.batch import Batch
from evenstep.data.digests import digest_of_batch
from evenstep.data.fetching import Fetcher, PartOf, Wanted
from evenstep.data.order import Cursor, epoch_order
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import DataError, InputError, hides_own_frames, shown
from evenstep.limits import MOST_EXAMPLES
from evenstep.options.checks import check_integer

_MOST_WORKERS = 1024
_AT_ONCE = 4096  # numbers of examples that are turned into Python's


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
            num_workers: number of processes that fetch examples; 0: the calling thread fetches
                them. Not used for a `TensorDataset`, which computes nothing. At most 24 for each
                process when several processes train together.
            collate_fn: makes a batch from a list of examples; it may stack them along a dimension
                other than the first (`batch_dim`), and mark tensors with `evenstep.shared`. None:
                as torch's `DataLoader` does. With several processes it gets a part of a batch, and
                must not draw random numbers.
            sampler: yields the indices of an epoch's examples, instead of `shuffle`; it needs a
                length. The generators that it draws from are seeded by (seed, epoch), as in
                `Trainer.epoch`. An example that it yields twice is augmented identically.

        Raises:
            DataError: the data set has no length, or no examples.
            InputError: the batch size or the number of workers is too small.
        """
        check_integer("batch_size", batch_size, at_least=1, at_most=MOST_EXAMPLES)
        check_integer("num_workers", num_workers, at_least=0, at_most=_MOST_WORKERS)
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.sampler = sampler
        self.examples = _count(dataset) if sampler is None else _count_drawn(sampler)
        are_rows = _are_rows(dataset)
        order = _Order(self.examples, seed, shuffle=shuffle, sampler=sampler)
        of_torch: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=BatchSampler(order, batch_size, bool(drop_last)),
            num_workers=0 if are_rows and collate_fn is None else num_workers,
            collate_fn=collate_fn,
        )
        self.fetcher = (_Rows if are_rows else Fetcher)(of_torch, seed, by_index=True)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.fetcher.loader)

    @property
    def epoch_examples(self) -> int:
        """The number of examples that an epoch visits."""
        return min(self.examples, len(self) * self.batch_size)

    def facts(self) -> dict[str, object]:
        """Return what the batches of every epoch depend on, besides the data set's contents."""
        facts: dict[str, object] = {
            "the kind of loader": "evenstep's own",
            "the data set": type(self.dataset).__name__,
            "its examples": self.examples,
            "batch_size": self.batch_size,
            "the seed of the order": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
        sampler = {} if self.sampler is None else {"the sampler": type(self.sampler).__name__}
        return facts | sampler

    def in_order(self) -> Loader:
        """Return a loader of the same data set that visits all examples without shuffling."""
        return Loader(
            self.dataset,
            self.batch_size,
            seed=self.seed,
            shuffle=False,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
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
        wanted = itertools.islice(self.fetcher.wanted(cursor.epoch), cursor.step, None)
        return self.fetcher.batches(wanted, part)


class _Order:
    """The order of an epoch's examples, which follows from its seed and the epoch, or a sampler."""

    def __init__(
        self, examples: int, seed: int, *, shuffle: bool, sampler: Iterable[int] | None
    ) -> None:
        self.sampler = sampler
        self._examples = examples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is drawn next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._examples

    def __iter__(self) -> Iterator[int]:
        some = self._drawn().split(_AT_ONCE)
        return itertools.chain.from_iterable(map(torch.Tensor.tolist, some))

    def _drawn(self) -> torch.Tensor:
        if self.sampler is None:
            if self._shuffle:
                return epoch_order(self._examples, self._seed, self._epoch)
            return torch.arange(self._examples)
        order = [*self.sampler]
        if len(order) != self._examples:
            raise InputError(
                f"{type(self.sampler).__name__} gave {len(order)} examples in epoch {self._epoch}, "
                f"but its length is {self._examples}: the two must be equal"
            )
        return torch.tensor(order, dtype=torch.int64)


class _Rows(Fetcher):
    """Takes rows of the tensors of a `TensorDataset`, unless they are collated by a function."""

    def digest_of_examples(self) -> int:
        """Return a checksum of about 64 examples, evenly spaced."""
        count = len(self.loader.dataset)  # type: ignore[arg-type]
        return digest_of_batch(self._rows(torch.arange(0, count, max(1, count // 64))))

    def _fetched(self, wanted: Iterator[Wanted], *, of_parts: bool = False) -> Iterator[Batch]:
        if self.loader.collate_fn is not default_collate:
            return super()._fetched(wanted, of_parts=of_parts)
        return (self._rows(torch.tensor(one.index)) for one in wanted)

    @INTERRUPTS.uninterrupted
    def _rows(self, index: torch.Tensor) -> Batch:
        """Copy some examples with one intra-op thread, because more would compete with the lanes.

        (Measured with an MLP on two CPU devices: 3 to 11 ms with two threads, 0.02 ms with one.)
        """
        tensors = self.loader.dataset.tensors  # type: ignore[attr-defined]
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


def _are_rows(dataset: Dataset[Any]) -> bool:
    """Whether examples are just rows of tensors (a subclass may compute them)."""
    return getattr(type(dataset), "__getitem__", None) is TensorDataset.__getitem__
