"""Batches of any iterable, drawn one after the other: streams, lists, generators."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from evenstep.batch import Batch
from evenstep.batch.seeds import derive_seed
from evenstep.data.adapters.map_style import is_torchdatas, sizes_of
from evenstep.data.digests import digest_of_batch
from evenstep.data.fetching import PartOf
from evenstep.data.generators import BorrowedGenerators, generators_of, samplers_of, set_epoch_of
from evenstep.data.order import Cursor, LoaderPlace
from evenstep.errors import CheckpointError, InputError, text_of
from evenstep.private_torch.loaders import end_kept_workers, end_workers

logger = logging.getLogger("evenstep")

_SNAPSHOT_EVERY = 100  # batches
_END = object()


class _Snapshot(NamedTuple):
    """The state of a loader before batch `step` of an epoch."""

    step: int
    state: Any
    numbers: list[Any]


class Stream:
    """The batches of an iterable, in its own order.

    What it draws in this process from torch's, Python's and numpy's default generators, and from
    generators that it holds, follows from (seed, epoch); its worker processes are seeded from there
    too. A batch in the middle of an epoch is reached by the loader's own state where it has one
    that is exact, otherwise by drawing and dropping the batches before.

    If `locked`, steps may be in flight while a batch is drawn.
    """

    fetches_parts = False
    last_examples: int | None = None
    whole_because = "only a map-style DataLoader says which examples a batch is made of"

    def __init__(self, loader: Iterable[Batch], seed: int, *, locked: bool) -> None:
        self._loader = loader
        self._seed = seed
        self._locked = locked
        self._has_state = _has_exact_state(loader)
        self._has_batches = any(
            getattr(stream, "batched", False)
            for part in (loader, getattr(loader, "dataset", None))
            for stream in _streams_of(part)
        )
        self._numbers = BorrowedGenerators((), locked=False)
        self._iterator: Iterator[Batch] = iter(())
        self._epoch = -1
        self._step = 0
        self._digest: int | None = None  # of the epoch's first batch
        self._snapshots: list[_Snapshot] = []
        self._has_said_threads = False
        self._tells_place = False  # the loader's own state, of each batch
        self._states: list[int] = []  # its checksums after two batches
        self._begun = 0  # epochs
        self._last: list[Batch] = []  # the last batch of an iterator, which can't be drawn again
        self.draws_in: int | None = None
        if (
            isinstance(loader, DataLoader)
            and loader.num_workers
            and not getattr(loader, "in_order", True)
        ):
            raise InputError(
                f"the {type(loader).__name__} has in_order=False, so that its batches come in the "
                f"order in which worker processes finish: leave it out"
            )

    def data(self) -> dict[str, object]:
        """Return what the batches of every epoch depend on."""
        loader = self._loader
        dataset = getattr(loader, "dataset", None)
        facts: dict[str, object] = {"the kind of loader": "a stream"}
        if dataset is not None:
            facts["the data set"] = type(dataset).__name__
        if isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset):
            facts |= {"num_workers": loader.num_workers, **sizes_of(loader)}
        return facts

    def digest_of_examples(self) -> int | None:
        """Return None: a stream can't be asked for examples."""
        return None

    def facts(self, cursor: Cursor) -> dict[str, object]:
        """Return what the batches of an epoch depend on besides: nothing that is known."""
        return {}

    def digest_before(self, step: int) -> int | None:
        """Return a checksum of the epoch's first batch; None if it was not drawn here."""
        return self._digest

    def open(self, cursor: Cursor, saved: LoaderPlace | None) -> str:
        """Go to a batch of an epoch; return how, in words.

        Raises:
            CheckpointError: the loader did not take its state back, or gave other batches than in
                the training that was saved.
            InputError: it has fewer batches, or is an iterator that is behind this place.
        """
        if isinstance(self._loader, Iterator):
            return self._open_iterator(self._loader, cursor, saved)
        if saved is not None and cursor.epoch and len(saved.before) == 2:
            self._repeat(cursor.epoch - 1, *saved.before)
        is_again = saved is None and cursor.epoch == self._epoch and cursor.step > 0
        first = self._digest if is_again else None if saved is None else saved.digest
        snapshot = self._snapshot_for(cursor, saved)
        self._begin(cursor.epoch)
        if snapshot is not None:
            self._continue(snapshot)
        elif self._has_state and not is_torchdatas(self._loader):
            self._take_snapshot()
        if snapshot is None or not snapshot.step:
            if snapshot is not None and is_torchdatas(self._loader):
                self._begin(cursor.epoch)  # only the data set keeps what it has loaded
            self._iterator = self._call(iter, self._loader)
        self._drop(cursor)
        self._refuse_others(first)
        by_state = f"its own state of batch {snapshot.step}, and " if snapshot is not None else ""
        dropped = cursor.step - (snapshot.step if snapshot is not None else 0)
        return f"{by_state}{dropped} batches drawn and dropped"

    def batches(self, part: PartOf | None) -> Iterator[Batch]:
        """Yield the batches from the opened place on."""
        if self._last and isinstance(self._loader, Iterator):
            yield from self._last
        is_kept = isinstance(self._loader, Iterator)
        while (batch := self._next()) is not _END:
            self._last = [batch] if is_kept else []
            yield batch
            self._last = []

    def snapshot_at(self, step: int, *, is_here: bool) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state at or before batch `step`.

        If `is_here`, that batch is the next one to be drawn.
        """
        if self._has_state and self._is_exact and is_here and step:
            self._take_snapshot()
        before = [one for one in self._snapshots if one.step <= step]
        return before[-1]._asdict() if before else {}

    def snapshot_behind(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state after an epoch."""
        if not self._has_state:
            return {}
        return _Snapshot(0, copy.deepcopy(self._state()), [])._asdict()

    def before(self) -> list[int]:
        """Return what a checkpoint holds of an epoch that has ended: see `LoaderPlace.before`.

        Nothing, if the order of an epoch is known to follow from its number or the loader's state.
        """
        loader, parts = self._loader, [self._loader, getattr(self._loader, "dataset", None)]
        is_told = any(callable(getattr(part, "set_epoch", None)) for part in parts)
        is_known = is_told or self._has_state or bool(getattr(loader, "num_workers", 0))
        if is_known or isinstance(loader, Iterator) or self._digest is None:
            return []
        return [self._digest, self._begun]

    def close(self) -> None:
        """End the worker processes of the last epoch."""
        iterator: Any = self._iterator
        self._iterator = iter(())
        if isinstance(self._loader, DataLoader):
            _end_workers(self._loader, iterator)

    # ---- the parts of the above

    def _begin(self, epoch: int) -> None:
        """Seed what the loader draws from, and let go of what it has begun before."""
        if epoch != self._epoch:
            self._begun += 1
            self._snapshots = []
            self._states = self._states if self._tells_place else []
        self._epoch, self._step, self._digest = epoch, 0, None
        parts = [self._loader, getattr(self._loader, "dataset", None)]
        if isinstance(self._loader, DataLoader):
            _start_anew(self._loader)
            parts += samplers_of(self._loader)
        generators = () if type(self._loader) in (list, tuple) else generators_of(self._loader)
        self._numbers = BorrowedGenerators(generators, locked=self._locked)
        self._numbers.seed(derive_seed("stream", self._seed, epoch))
        set_epoch_of(epoch, *parts)

    def _repeat(self, epoch: int, digest: int, begun: int) -> None:
        """Begin the epoch before the one where a training resumes, and compare its first batch.

        A loader that shuffles its examples in place depends on what it has done before. One that
        was new in that epoch may be new in each, and have other batches.
        """
        self._begin(epoch)
        self._iterator = self._call(iter, self._loader)
        self._next()
        if self._digest != digest and begun > 1:
            logger.warning(
                "%s gives other batches in epoch %d than in the training that was saved, and so "
                "maybe in this one: its data have changed, or its order depends on earlier epochs "
                "(it shuffles in place, or counts epochs). Let the order follow from the default "
                "generators alone or from `set_epoch`, or give it state_dict and load_state_dict",
                type(self._loader).__name__,
                epoch,
            )
        self._begun = begun

    def _open_iterator(
        self, iterator: Iterator[Batch], cursor: Cursor, saved: LoaderPlace | None
    ) -> str:
        """Go to a batch of an iterator, which knows only one direction."""
        drawn = self._step - len(self._last)
        if self._epoch < 0:
            self._begin(cursor.epoch)
            self._iterator = iterator
            self._drop(cursor)
            self._refuse_others(None if saved is None else saved.digest)
            return f"{cursor.step} batches drawn and dropped"
        if cursor.epoch != self._epoch:
            raise InputError(
                f"{type(iterator).__name__} is an iterator, and was exhausted in epoch "
                f"{self._epoch}: give a loader or a list, or a new iterator for each epoch"
            )
        if cursor.step != drawn:
            raise InputError(
                f"{type(iterator).__name__} is an iterator, and has given {self._step} batches of "
                f"epoch {cursor.epoch}, but training is at batch {cursor.step}: give a loader or a "
                f"list, which can be iterated again"
            )
        return "it went on"

    def _snapshot_for(self, cursor: Cursor, saved: LoaderPlace | None) -> _Snapshot | None:
        if not self._has_state:
            return None
        if saved is not None and saved.snapshot:
            if saved.loader != type(self._loader).__name__:
                raise CheckpointError(
                    f"the checkpoint has the state of a {saved.loader}, but trainer.epoch got a "
                    f"{type(self._loader).__name__}: give the loader that was saved"
                )
            return _Snapshot(**saved.snapshot)
        if cursor.epoch != self._epoch:
            return None
        self._snapshots = [one for one in self._snapshots if one.step <= cursor.step]
        return self._snapshots[-1] if self._snapshots else None

    def _continue(self, snapshot: _Snapshot) -> None:
        """Give the loader its own state back, and begin to iterate it there."""
        loader: Any = self._loader
        try:
            loader.load_state_dict(copy.deepcopy(snapshot.state))
            self._tells_place |= bool(snapshot.step)
            if snapshot.step or is_torchdatas(loader):  # others count how often they are iterated
                self._iterator = self._call(iter, loader)
            if snapshot.step:
                self._numbers.load_state_dict(snapshot.numbers)
        except Exception as error:
            raise CheckpointError(
                f"the {type(loader).__name__} could not load the state that its state_dict "
                f"returned ({type(error).__name__}: {text_of(error)}): give the loader that was "
                f"saved, with the same data set and the same number of workers"
            ) from error
        self._step = snapshot.step
        self._snapshots = [snapshot]

    def _state(self) -> Any:
        loader: Any = self._loader
        return loader.state_dict()

    def _take_snapshot(self) -> None:
        numbers = self._numbers.state_dict()
        snapshot = _Snapshot(self._step, copy.deepcopy(self._state()), numbers)
        self._snapshots = [one for one in self._snapshots if one.step < self._step][-1:]
        self._snapshots.append(snapshot)

    def _drop(self, cursor: Cursor) -> None:
        while self._step < cursor.step:
            if self._next() is _END:
                raise InputError(
                    f"{type(self._loader).__name__} gave {self._step} batches in epoch "
                    f"{cursor.epoch}, but training is at batch {cursor.step}: give the loader and "
                    f"the data set that training started with"
                )

    def _refuse_others(self, then: int | None) -> None:
        """Refuse a loader whose first batch is not that of the training before."""
        if then is not None and self._digest is not None and then != self._digest:
            raise CheckpointError(
                f"{type(self._loader).__name__} gives other batches in epoch {self._epoch} than in "
                f"the training that was saved, or before a break: its data have changed, it draws "
                f"from a generator that evenstep can't seed, or it shuffles in place. Give it a "
                f"`set_epoch` method, or let it draw from the default generators of torch, Python "
                f"or numpy"
            )

    def _next(self) -> Any:
        states = self._numbers.states
        threads = set() if self._step else {*threading.enumerate()}
        batch = self._call(next, self._iterator, _END)
        if batch is _END:
            return batch
        if self._step == 0:
            self._digest = digest_of_batch(batch)
            if threads < {*threading.enumerate()} and self._numbers.have_drawn_since(states):
                self._say_threads()
        self._step += 1
        if self._has_state:
            self._watch_state()
        return batch

    def _say_threads(self) -> None:
        """Log once that the loader may draw in threads of its own: none seeds them at a batch."""
        dataset = getattr(self._loader, "dataset", self._loader)
        if self._has_said_threads or not _may_draw_in_threads(dataset):
            return
        self._has_said_threads = True
        logger.warning(
            "%s makes examples in threads of its own. If random numbers are drawn there, from "
            "torch's, Python's or numpy's default generator, they depend on timing, so each run "
            "has another result: draw behind what starts the threads (`stream.shuffle(...).map("
            "augment)`, not the other way round), or in the model",
            type(self._loader).__name__,
        )

    @property
    def _is_exact(self) -> bool:
        """Whether the loader goes on exactly from its state before the next batch.

        Hugging Face's streams compute a batch of their own (`map(..., batched=True)`) again to go
        on inside of it, so it would have other random numbers.
        """
        return self._tells_place and not (self._has_batches and self._numbers.have_drawn)

    def _watch_state(self) -> None:
        """See whether the loader's state changes with each batch, and keep it now and then.

        One that stays the same for two batches says where an epoch begins, not the place in it.
        """
        if len(self._states) < 2:
            self._states.append(digest_of_batch(self._state()))
            self._tells_place |= len({*self._states}) == 2
        if self._step % _SNAPSHOT_EVERY == 0 and self._is_exact:
            self._take_snapshot()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.draws_in = threading.get_ident() if self._locked else None
        try:
            return self._numbers.call(function, *arguments)
        finally:
            self.draws_in = None


def _has_exact_state(loader: Any) -> bool:
    """Whether a loader goes on exactly from its own state.

    Not if worker processes draw its batches: their generators are not in the state. Nor if Hugging
    Face's streams shuffle: their buffers are not in it. Nor torchdata's loader if its data set has
    no state: a state that it gives after a resume counts the batches before the resume twice.
    """
    if isinstance(loader, DataLoader) and loader.num_workers:
        return False
    if is_torchdatas(loader) and not has_own_state(loader.dataset):
        return False
    return has_own_state(loader) and not any(
        map(_has_shuffle_buffer, (loader, getattr(loader, "dataset", None)))
    )


def has_own_state(part: object) -> bool:
    """Return whether an object can save its place and load it."""
    return all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))


def _has_shuffle_buffer(dataset: Any) -> bool:
    return any("BufferShuffled" in type(one).__name__ for one in _streams_of(dataset))


def _may_draw_in_threads(dataset: Any) -> bool:
    """Return whether threads of a loader may draw; in those of Hugging Face, only a `map` does."""
    streams = [one for one in _streams_of(dataset) if one is not None]
    in_threads = (one for one in streams if "Interleaved" in type(one).__name__)
    return not streams or any(
        hasattr(inner, "function") for one in in_threads for inner in _streams_below(one)
    )


def _streams_of(dataset: Any) -> Iterator[object]:
    """Yield what one of Hugging Face's streams is made of."""
    yield from _streams_below(getattr(dataset, "_ex_iterable", None))


def _streams_below(stream: object) -> Iterator[object]:
    """Yield a stream, and what it is made of."""
    level = [stream]
    while level:
        yield from level
        level = [inner for one in level for inner in _inner_streams(one)]


def _inner_streams(stream: object) -> list[object]:
    one = getattr(stream, "ex_iterable", None)
    return [*getattr(stream, "ex_iterables", ()), *([] if one is None else [one])]


def _start_anew(loader: Any) -> None:
    """End the iterator, and worker processes, that a `DataLoader` has kept from the last epoch.

    Workers that stay would go on with random numbers that depend on how many epochs they have seen.
    """
    if is_torchdatas(loader):
        loader.load_state_dict({})
    else:
        end_kept_workers(loader)


def _end_workers(loader: Any, iterator: Any) -> None:
    end_workers(iterator)
    if loader.persistent_workers:
        end_kept_workers(loader)
