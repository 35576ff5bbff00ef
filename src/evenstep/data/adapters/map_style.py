"""Batches of a map-style loader, from any place in an epoch: torch's `DataLoader`, and `Loader`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

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

from evenstep.batch import Batch
from evenstep.data.digests import digest_of_index
from evenstep.data.fetching import Fetcher, PartOf, Wanted
from evenstep.data.generators import samplers_of
from evenstep.data.loader import Loader
from evenstep.data.order import Cursor, LoaderPlace
from evenstep.errors import CheckpointError, InputError
from evenstep.private_torch.loaders import makes_iterator

_FIRST = 64  # batches of an epoch whose order is compared
_REMEMBERED = 4096  # batches: more than may be in flight, or fetched ahead

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
    own, torchs = ((one.__iter__, makes_iterator(one)) for one in (kind, DataLoader))
    is_plain = own == torchs or is_torchdatas(loader)
    has_lists = not isinstance(loader.dataset, IterableDataset)
    parts = [loader.dataset, *samplers_of(loader)]
    return is_plain and has_lists and not any(map(_has_state, parts))


class MapStyle:
    """The batches of a map-style `DataLoader`.

    Attributes:
        fetches_parts: whether a process can fetch the examples of its own shards alone: only
            torch's own `default_collate` is known to give the same rows then.
        whole_because: if not, the reason, as a clause.
    """

    draws_in: int | None = None

    def __init__(self, loader: DataLoader[Any], seed: int, fetcher: Fetcher | None = None) -> None:
        self.loader = loader
        self._name = type(loader).__name__
        self._fetcher = fetcher or Fetcher(loader, seed)
        self._is_repeatable = False  # its order
        self._digests: dict[int, int] = {}
        self._wanted: Iterator[Wanted] = iter(())
        has_batches = loader.batch_sampler is not None
        self.fetches_parts = has_batches and loader.collate_fn is default_collate
        may_mix = "its collate_fn may pad or mix the examples of a whole batch"
        self.whole_because = may_mix if has_batches else "it has no batch sampler"

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
            **sizes_of(self.loader),
        }

    def digest_of_examples(self) -> int | None:
        """Return a checksum of some examples; None if there are none."""
        self._refuse_unseeded_order(0)
        return self._fetcher.digest_of_examples()

    def facts(self, cursor: Cursor) -> dict[str, object]:
        """Return what the batches of an epoch depend on besides."""
        self._refuse_unseeded_order(cursor.epoch)
        digest = self._digest_of_first(cursor.epoch)
        return {"a digest of the order of its first batches": digest}

    def open(self, cursor: Cursor, saved: LoaderPlace | None) -> str:
        """Go to a batch of an epoch; return how, in words. The batches before are not fetched.

        Raises:
            CheckpointError: the order is not that of the training that was saved.
            InputError: the order can't be repeated, or has fewer batches.
        """
        self._refuse_unseeded_order(cursor.epoch)
        self._digests = {0: 0}
        self._wanted = self._digested(self._fetcher.wanted(cursor.epoch), self._digests)
        skipped = sum(1 for _ in itertools.islice(self._wanted, cursor.step))
        if skipped < cursor.step:
            raise InputError(
                f"{self._name} has {skipped} batches in epoch {cursor.epoch}, but training is at "
                f"batch {cursor.step}: give the loader and the data set that training started with"
            )
        then = None if saved is None else saved.digest
        if then is not None and then != self._digests[cursor.step]:
            raise CheckpointError(
                f"the sampler of the {self._name} gives other batches in epoch {cursor.epoch} than "
                f"in the training that was saved: give the loader, the data set and the seed that "
                f"training started with"
            )
        return f"{skipped} batches drawn from the sampler, and not fetched"

    def batches(self, part: PartOf | None) -> Iterator[Batch]:
        """Yield the batches from the opened place on, or this process's part of each."""
        return self._fetcher.batches(self._wanted, part)

    def snapshot_at(self, step: int, *, is_here: bool) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state: nothing."""
        return {}

    def snapshot_behind(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state after an epoch: nothing."""
        return {}

    def before(self) -> list[int]:
        """Return what a checkpoint holds of an epoch that has ended: nothing."""
        return []

    def digest_before(self, step: int) -> int | None:
        """Return a checksum of the batches before batch `step` of the epoch; None if unknown."""
        return self._digests.get(step)

    def close(self) -> None:
        """End worker processes that were kept from epoch to epoch."""
        self._fetcher.close()

    # ---- the order

    def _digested(self, wanted: Iterator[Wanted], digests: dict[int, int]) -> Iterator[Wanted]:
        """Yield batches, and keep a checksum of those before each."""
        digest = 0
        for one in wanted:
            digests[one.step + 1] = digest = digest_of_index(one.index, digest)
            digests.pop(one.step - _REMEMBERED, None)
            yield one

    def _digest_of_first(self, epoch: int) -> int:
        first = itertools.islice(self._fetcher.wanted(epoch), _FIRST)
        return digest_of_index([one.index for one in first])

    def _refuse_unseeded_order(self, epoch: int) -> None:
        """Draw the first batches of an epoch twice, once in a training."""
        if self._is_repeatable:
            return
        if self._digest_of_first(epoch) != self._digest_of_first(epoch):
            names = " in ".join(type(one).__name__ for one in reversed(self._fetcher.samplers))
            raise InputError(
                f"the sampler of the {self._name}, {names}, gave two orders for epoch {epoch}: it "
                f"draws from a generator that evenstep can't seed, or changes its order each time "
                f"it is iterated, so the order could not be repeated after a resume. Let it draw "
                f"from torch's default generator or from one in an attribute `generator`, or let "
                f"the order depend on `set_epoch(epoch)`"
            )
        self._is_repeatable = True


class Own(MapStyle):
    """The batches of evenstep's `Loader`, of which each process can fetch its own parts."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader.fetcher.loader, loader.seed, loader.fetcher)
        self._own = loader
        self._name = type(loader).__name__
        self._is_repeatable = loader.sampler is None
        self.fetches_parts = True

    def data(self) -> dict[str, object]:
        """Return what the batches of every epoch depend on, besides the data set's contents."""
        return self._own.facts()


def _has_state(part: object) -> bool:
    is_known = type(part) in _WITHOUT_STATE or type(part).__module__.startswith("torchdata.")
    return not is_known and callable(getattr(part, "state_dict", None))


def sizes_of(loader: DataLoader[Any]) -> dict[str, object]:
    """Return how torch's own batch sampler cuts the examples of a loader into batches, by name."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler):
        return {}
    sizes = {name: getattr(batches, name, None) for name in ("batch_size", "drop_last")}
    return {name: value for name, value in sizes.items() if isinstance(value, int)}


def is_torchdatas(loader: object) -> bool:
    """Whether `loader` is torchdata's `StatefulDataLoader`."""
    kind = type(loader)
    return kind.__module__.startswith("torchdata.") and kind.__name__ == "StatefulDataLoader"
