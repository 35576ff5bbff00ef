"""Any iterable of batches as the data of a training: in a repeatable order, with a place in it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from evenstep.batch import Batch
from evenstep.data.adapters.map_style import MapStyle, Own, is_map_style
from evenstep.data.adapters.streams import Stream
from evenstep.data.fetching import PartOf
from evenstep.data.generators import samplers_of
from evenstep.data.loader import Loader
from evenstep.data.order import Cursor, LoaderPlace
from evenstep.data.workers import refuse_half_a_batch
from evenstep.devices.facts import differences, listed, refuse_to_resume
from evenstep.errors import InputError, shown

logger = logging.getLogger("evenstep")

Batches: TypeAlias = Iterable[Batch]
"""What `Trainer.epoch` takes: a loader of evenstep, of torch, or any iterable of batches."""

EXAMPLES = "a digest of some examples"
"""The fact that tells data sets of one length apart."""

_MOST_KNOWN = 8  # loaders of a training that are remembered, the last ones
_SLOW_S = 5.0  # to resume: worth a warning
_END = object()  # behind the last batch


class SavedPlace:
    """What a checkpoint has of the place in a loader, until that loader is given."""

    def __init__(self) -> None:
        self.saved: LoaderPlace | None = None

    def at(self, cursor: Cursor) -> LoaderPlace | None:
        """Return what there is of a place."""
        saved = self.saved
        is_of = saved is not None and (saved.epoch, saved.step) == (cursor.epoch, cursor.step)
        return saved if is_of else None


class Source:
    """The data of a training: a loader, and the place in it.

    If `locked`, steps may be in flight while a batch is drawn. `held` is what a checkpoint has of
    the place in an epoch, until it is used; None for a loader whose place no checkpoint has.

    Attributes:
        fetches_parts: whether each of several processes can fetch its own part of a batch alone.
        whole_because: if not, the reason, as a clause.
    """

    def __init__(
        self, loader: Batches, seed: int, *, locked: bool, held: SavedPlace | None
    ) -> None:
        self.loader = loader
        self._is_kept = held is not None
        self._held = held or SavedPlace()
        self._inner: MapStyle | Stream
        if isinstance(loader, Loader):
            self._inner = Own(loader)
        elif isinstance(loader, DataLoader) and is_map_style(loader):
            self._inner = MapStyle(loader, seed)
        else:
            self._inner = Stream(loader, seed, locked=locked)
        self.fetches_parts = self._inner.fetches_parts
        self.whole_because = self._inner.whole_because
        self._found: dict[str, object] | None = None
        self._epoch = 0
        self._step = 0  # batches of the epoch that were drawn
        self._length: int | None = None  # of the last epoch that ended

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return type(self.loader).__name__

    @property
    def last_examples(self) -> int | None:
        """The number of examples in an epoch's last batch; None if it is unknown."""
        return self._inner.last_examples

    @property
    def draws_in(self) -> int | None:
        """The thread that draws a batch now, with other threads locked out; else None."""
        return self._inner.draws_in

    def facts(self, cursor: Cursor) -> dict[str, object]:
        """Return what must be the same in all processes before an epoch."""
        named = {"the loader": self.name, "its length": length_of(self.loader)}
        return {**named, **self._data(), **self._inner.facts(cursor)}

    def _data(self) -> dict[str, object]:
        """Return what the batches of every epoch depend on; find it out once."""
        if self._found is None:
            digest = self._inner.digest_of_examples() if self._is_kept else None
            self._found = {**self._inner.data(), EXAMPLES: digest}
        return self._found

    def facts_at_end(self) -> dict[str, object]:
        """Return what must be the same in all processes after an epoch."""
        digest = self._inner.digest_before(self._step)
        return {"the batches of the epoch": self._step, "a digest of their order": digest}

    def epoch(self, cursor: Cursor, part: PartOf | None = None) -> Iterator[Batch]:
        """Yield the batches of `cursor.epoch` from `cursor.step` on, or this process's parts.

        Raises:
            InputError: there are none, or fewer than `cursor.step`, or they are not repeatable.
            RuntimeError: a worker process of the loader has ended.
        """
        self._epoch, self._step = cursor.epoch, 0
        saved = self._held.at(cursor)
        if self._is_kept:
            self._compare(cursor, {} if saved is None else saved.facts)
        began_s = time.perf_counter()
        how = self._inner.open(cursor, saved)
        self._held.saved = None
        if cursor.step and how:
            self._say_resumed(cursor, how, time.perf_counter() - began_s)
        self._step = cursor.step
        batches = self._inner.batches(part)
        # No `try` around `yield`: its code would run, and lose a Ctrl-C, where Python drops this.
        while (batch := self._next(batches)) is not _END:
            self._step += 1
            yield batch
        self._end()

    def _next(self, batches: Iterator[Batch]) -> Batch:
        try:
            return next(batches, _END)
        except (OSError, EOFError) as error:
            refuse_half_a_batch(error, self.name)
            raise

    def saved_at(self, cursor: Cursor) -> LoaderPlace:
        """Return what a checkpoint must hold to resume at `cursor`, which is not ahead of here."""
        digest, before = None, []
        if cursor.epoch == self._epoch:
            digest = self._inner.digest_before(cursor.step)
            snapshot = self._inner.snapshot_at(cursor.step, is_here=cursor.step == self._step)
        else:
            snapshot = self._inner.snapshot_behind()
            before = self._inner.before() if cursor.epoch == self._epoch + 1 else []
        return LoaderPlace(
            loader=self.name,
            epoch=cursor.epoch,
            step=cursor.step,
            digest=digest,
            snapshot=snapshot,
            facts=self._data(),
            before=before,
        )

    def close(self) -> None:
        """End what was kept from epoch to epoch."""
        self._inner.close()

    def _compare(self, cursor: Cursor, saved: Mapping[str, object]) -> None:
        """Refuse other data than the checkpoint's in the middle of an epoch; else say so.

        Raises:
            CheckpointError: names what differs.
        """
        then, now = {"data": saved}, {"data": self._data()}
        if cursor.step:
            refuse_to_resume(then, now)
        elif different := [*differences(then, now)]:
            logger.warning(
                "epoch %d begins with other data than the checkpoint's: %s",
                cursor.epoch,
                listed(different),
            )

    def _say_resumed(self, cursor: Cursor, how: str, took_s: float) -> None:
        level = logging.WARNING if took_s > _SLOW_S else logging.INFO
        logger.log(
            level,
            "%s: back at batch %d of epoch %d after %.1f s (%s)",
            self.name,
            cursor.step,
            cursor.epoch,
            took_s,
            how,
        )

    def _end(self) -> None:
        """Note how long the epoch was."""
        if not self._step:
            raise InputError(
                f"{self.name} gave no batch in epoch {self._epoch}: give a loader with at least "
                f"one batch (with drop_last=True, as many examples as a batch has), and a new "
                f"iterator for each epoch"
            )
        if self._length not in (None, self._step):
            logger.warning(
                "%s gave %d batches in epoch %d, and %d in the epoch before: a learning-rate "
                "schedule that counts batches no longer fits, and a resume needs the same number "
                "again, so it should depend on nothing but the epoch",
                self.name,
                self._step,
                self._epoch,
                self._length,
            )
        self._length = self._step


class Sources:
    """The loaders of a training, each with what is known of it from epoch to epoch.

    `locked` is as for `Source`. If `are_kept`, checkpoints have the places in them.
    """

    def __init__(self, seed: int, *, locked: bool, are_kept: bool = True) -> None:
        self._seed = seed
        self._locked = locked
        self._known: list[Source] = []
        self._held = SavedPlace() if are_kept else None

    def of(self, loader: Batches) -> Source:
        """Return the source of a loader, the same one in every epoch.

        Raises:
            InputError: it is not an iterable of batches, or cut for several processes already.
        """
        known = next((one for one in self._known if one.loader is loader), None)
        if known is None:
            _check(loader)
            known = Source(loader, self._seed, locked=self._locked, held=self._held)
        else:
            self._known.remove(known)
        self._known.append(known)
        while len(self._known) > _MOST_KNOWN:
            self._known.pop(0).close()
        return known

    def restore(self, saved: LoaderPlace | None, *, rounds: bool) -> None:
        """Resume where `saved_at` was called, once the loader is given.

        If `rounds`, numbers are rounded differently here: examples too, if they are computed.
        """
        assert self._held is not None
        if saved is not None and rounds:
            facts = {name: value for name, value in saved.facts.items() if name != EXAMPLES}
            saved = dataclasses.replace(saved, facts=facts)
        self._held.saved = saved

    def saved_at(self, cursor: Cursor) -> LoaderPlace | None:
        """Return what a checkpoint must hold of the loader that was drawn from last."""
        assert self._held is not None
        held = self._held.at(cursor)
        if held is not None:  # nothing was drawn since the training was resumed
            return held
        return self._known[-1].saved_at(cursor) if self._known else None

    @property
    def draws_in(self) -> int | None:
        """The thread that draws a batch now, with other threads locked out; else None."""
        return self._known[-1].draws_in if self._known else None

    def close(self) -> None:
        """End worker processes that were kept from epoch to epoch."""
        for one in self._known:
            one.close()


def length_of(loader: object) -> int | None:
    """Return the number of batches in an epoch; None if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a loader of a data set without a length has none
        return None


def _check(loader: object) -> None:
    """Refuse what is not an iterable of batches, in words that say what to give."""
    name = type(loader).__name__
    if isinstance(loader, torch.Tensor):
        raise InputError(
            "got a tensor as a loader, so each of its rows would be a batch: give an iterable of "
            "batches, such as torch.utils.data.DataLoader(...) or a list, [(X, y)]"
        )
    if isinstance(loader, tuple) and loader and {torch.Tensor}.issuperset(map(type, loader)):
        raise InputError(
            f"got a tuple of {len(loader)} tensors as a loader, so each of them would be a batch: "
            f"give an iterable of batches, such as torch.utils.data.DataLoader(...) or a list, "
            f"[(X, y)]"
        )
    if callable(loader) and not hasattr(type(loader), "__iter__"):
        raise InputError(
            f"got {shown(loader)} as a loader: call it, and give the batches that it returns"
        )
    is_of_examples = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if is_of_examples or (type(loader).__module__, name) == ("datasets.arrow_dataset", "Dataset"):
        raise InputError(
            f"got the data set {name}, which gives examples, as a loader: give batches, such as "
            f"torch.utils.data.DataLoader(dataset, batch_size=...)"
        )
    if isinstance(loader, str | bytes | Mapping) or not hasattr(type(loader), "__iter__"):
        raise InputError(
            f"got {shown(loader)} as a loader: give an iterable of batches, such as a DataLoader "
            f"or a list"
        )
    samplers = samplers_of(loader) if isinstance(loader, DataLoader) else []
    for sampler in samplers:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise InputError(
                f"{name} has a {type(sampler).__name__} for {sampler.num_replicas} processes: "
                f"evenstep cuts each batch for the processes itself, so give every process the "
                f"same loader over all examples, with shuffle={sampler.shuffle} instead of the "
                f"sampler, and the batch size of all processes together"
            )
    for part in (loader, getattr(loader, "dataset", None)):
        cut = getattr(getattr(part, "_distributed", None), "world_size", 1)
        if cut != 1:
            raise InputError(
                f"{name} has a data set that was split by node for {cut} processes: evenstep cuts "
                f"each batch for the processes itself, so leave split_dataset_by_node out"
            )
