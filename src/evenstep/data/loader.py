"""Batches of a data set, from any place in any epoch, without state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

import optree
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from evenstep.batch import Batch, Part
from evenstep.batch.rng import derive_seed
from evenstep.data.order import Cursor, epoch_order
from evenstep.data.seeded import SeededExamples
from evenstep.devices import intra_op_threads
from evenstep.errors import DataError, InputError

PartOf: TypeAlias = "Callable[[int, int], Part]"
"""What this process gets of a batch, from its number in the epoch and its number of examples."""

MOST_WORKERS_FOR_PARTS = 12
"""A worker fetches two batches ahead; parts are settled no further ahead than that (`dealing`)."""


class Loader:
    """Cuts each epoch of a data set into batches.

    What an epoch yields is a function of (dataset, batch_size, seed, shuffle, drop_last, epoch)
    alone: the same for any number of workers, and the same from a place on as for the whole epoch.
    The global generators are left as they were.

        for batch in loader.epoch(Cursor(epoch=2, step=3)): ...
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
    ) -> None:
        """Check the arguments; nothing is read or started.

        Args:
            dataset: any map-style data set. A `TensorDataset` is indexed directly and yields
                tuples of tensors; of any other the examples are collated by torch's `DataLoader`.
            batch_size: examples a batch.
            seed: of the order and of random augmentation.
            shuffle: visit the examples in `epoch_order`; else as they lie.
            drop_last: leave out the short last batch of an epoch; else it is trained on exactly.
            workers: processes that fetch examples; 0 fetches them in the caller's thread. Not
                used for a `TensorDataset`, where nothing is computed. Where several processes
                train together, each takes 12 at the most.

        Raises:
            DataError: a data set without a length, or without examples.
            InputError: a batch size or number of workers that is too small.
        """
        if batch_size < 1:
            raise InputError(f"got a batch size of {batch_size}: at least 1 is needed")
        if workers < 0:
            raise InputError(f"got {workers} workers: at least 0 is needed")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.workers = workers
        self.examples = _count(dataset)

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        full, rest = divmod(self.examples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def epoch_examples(self) -> int:
        """The number of examples that an epoch visits."""
        return min(self.examples, len(self) * self.batch_size)

    def facts(self) -> dict[str, object]:
        """Return what its batches depend on, for comparison with another process's.

        Of tensors that are indexed directly: a digest of up to 64 examples, evenly spaced.
        """
        facts: dict[str, object] = {
            "the data set": type(self.dataset).__name__,
            "its examples": self.examples,
            "batch_size": self.batch_size,
            "the seed of the order": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
        if _is_indexable(self.dataset):
            some = torch.arange(0, self.examples, max(1, self.examples // 64))
            rows = [tensor.cpu()[some].contiguous() for tensor in self.dataset.tensors]
            digest = hashlib.sha256()
            for row in rows:
                digest.update(f"{row.dtype} {tuple(row.shape)}".encode())
                digest.update(row.flatten().view(torch.uint8).numpy().data)
            facts["a digest of some examples"] = digest.hexdigest()
        return facts

    def in_order(self) -> Loader:
        """Return one that visits every example as they lie, over the same data set."""
        return Loader(
            self.dataset, self.batch_size, seed=self.seed, shuffle=False, workers=self.workers
        )

    def size_of(self, step: int) -> int:
        """Return the number of examples in batch `step` of an epoch."""
        return min(self.batch_size, self.examples - step * self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of epoch 0."""
        return self.epoch(Cursor())

    def epoch(self, cursor: Cursor, part: PartOf | None = None) -> Iterator[Batch]:
        """Yield the batches of `cursor.epoch` from batch `cursor.step` on.

        Args:
            cursor: where to begin.
            part: which part of each batch to yield, and to fetch; None for all of it. It is asked
                when a batch is fetched, with several workers some batches ahead.

        At the end of an epoch (`step == len(self)`) there are none. Raises InputError beyond it.
        """
        if cursor.step > len(self):
            raise InputError(
                f"got {cursor}, but an epoch has {len(self)} batches "
                f"({self.examples} examples, {self.batch_size} a batch): is it another data set, "
                f"or another batch size?"
            )
        end = len(self) * self.batch_size
        rest = self._order(cursor.epoch)[cursor.step * self.batch_size : end]
        indices = [*rest.split(self.batch_size)] if len(rest) else []
        if part is None:
            return self._batches(cursor.epoch, indices)
        return self._parts(cursor, indices, part)

    def _order(self, epoch: int) -> torch.Tensor:
        if self.shuffle:
            return epoch_order(self.examples, self.seed, epoch)
        return torch.arange(self.examples)

    def _batches(
        self, epoch: int, indices: Iterable[torch.Tensor], most_workers: int | None = None
    ) -> Iterator[Batch]:
        if _is_indexable(self.dataset):
            for index in indices:
                yield _rows(self.dataset.tensors, index)
        else:
            workers = self.workers if most_workers is None else min(self.workers, most_workers)
            yield from self._collated(epoch, indices, workers)

    def _parts(self, cursor: Cursor, indices: list[torch.Tensor], part: PartOf) -> Iterator[Batch]:
        """Yield parts of batches. Of one without examples: what is left of another's example."""
        empty: set[int] = set()

        def own() -> Iterator[torch.Tensor]:
            for number, index in enumerate(indices, cursor.step):
                mine = index[part(number, len(index)).own]
                if not len(mine):
                    empty.add(number)
                yield mine if len(mine) else index[:1]

        batches = self._batches(cursor.epoch, own(), most_workers=MOST_WORKERS_FOR_PARTS)
        for number, batch in enumerate(batches, cursor.step):
            yield optree.tree_map(_none_of, batch) if number in empty else batch

    def _collated(
        self, epoch: int, indices: Iterable[torch.Tensor], workers: int
    ) -> Iterator[Batch]:
        batches: Any = iter(
            DataLoader(
                SeededExamples(self.dataset, self.seed, epoch),
                batch_sampler=(index.tolist() for index in indices),
                num_workers=workers,
                # Its own: a DataLoader without one draws from the global generator.
                generator=torch.Generator().manual_seed(derive_seed("workers", self.seed, epoch)),
            )
        )
        try:
            yield from batches
        finally:
            if workers:
                # Its `__del__` does this too, but not while a traceback holds it.
                batches._shutdown_workers()


def _none_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0]


def _rows(tensors: Sequence[torch.Tensor], index: torch.Tensor) -> Batch:
    """Copy some examples, with one thread: a pool of threads here fights with the devices' lanes.

    (Measured with an MLP on two CPU devices: 3 to 11 ms with two threads, 0.02 ms with one.)
    """
    with intra_op_threads(1):
        return tuple(tensor.index_select(0, index.to(tensor.device)) for tensor in tensors)


def _count(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} has no examples by number (a length and an index are "
            f"needed to repeat their order): iterate it yourself and call trainer.step"
        )
    if len(dataset) == 0:
        raise DataError(f"{type(dataset).__name__} has 0 examples: at least 1 is needed")
    return len(dataset)


def _is_indexable(dataset: Dataset[Any]) -> TypeGuard[TensorDataset]:
    """Whether an example is just a row of tensors, nothing computed (a subclass may compute)."""
    return (
        isinstance(dataset, TensorDataset)
        and type(dataset).__getitem__ is TensorDataset.__getitem__
    )
