"""The processes that train together: one alone, or several that a launcher has started.

A group answers what a process must know besides its own devices: which shards are its own, which
part of a batch to load, how a step's partial sums become one, and when all processes stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from evenstep.batch import Batch, Part, count_examples, cut_batch, shard_bounds
from evenstep.batch.cut import Cut
from evenstep.collectives import TreeSum, tree_plan
from evenstep.data import Cursor, Loader
from evenstep.distributed import (
    LauncherWatch,
    agree,
    join,
    refuse_divergence,
    show_told_in_a_line,
    was_launched,
)
from evenstep.replicas import Replicas
from evenstep.shard.evaluation import Pairs
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.gradients import GradientStream
from evenstep.shard.partial_sum import Add, PartialSum
from evenstep.training.step import Attempt, Step
from evenstep.training.step_exchange import ProcessReducer


class Reducer(Protocol):
    """Turns the partial sums of a step into the root of the canonical tree."""

    def begin(self, attempt: Attempt, add: Add, *, may_stream: bool) -> GradientStream | None:
        """Give an attempt its tree; return what takes gradients during backward passes, if any."""
        ...

    def reduce(self, step: Step) -> tuple[Sequence[Leaf | None], PartialSum]:
        """Return every shard's (total, count) and the root, when all own shards are done."""
        ...

    def announce_retry(self, step: Step) -> None:
        """Have all processes attempt the step again, unless they know already."""
        ...

    def announce_failure(self, step: Step, error: BaseException) -> None:
        """Have all processes give the step up, unless they know already."""
        ...

    def leave(self, error: BaseException) -> None:
        """Tell the other processes why this one takes no further step."""
        ...


class LocalReducer:
    """Reduces inside one process, where the tree's only partial sum is the root."""

    def begin(self, attempt: Attempt, add: Add, *, may_stream: bool) -> None:
        """Give an attempt its tree."""
        cut = attempt.cut
        attempt.tree = TreeSum(tree_plan(len(cut.bounds), cut.filled), add)

    def reduce(self, step: Step) -> tuple[Sequence[Leaf | None], PartialSum]:
        """Return every shard's (total, count), and the root."""
        attempt = step.attempt
        assert attempt.tree is not None
        (root,) = attempt.tree.take_tops()
        return [*map(attempt.results.get, range(len(attempt.cut.bounds)))], root

    def announce_retry(self, step: Step) -> None:
        """There is nobody to tell."""

    def announce_failure(self, step: Step, error: BaseException) -> None:
        """There is nobody to tell."""

    def leave(self, error: BaseException) -> None:
        """There is nobody to tell."""


class Group:
    """A process that trains alone.

    Attributes:
        reducer: turns the partial sums of a step into one.
        is_alone: whether there are no other processes.
        is_first: whether this process is the one that writes files.
    """

    is_alone = True
    is_first = True

    def __init__(self) -> None:
        self.reducer: Reducer = LocalReducer()
        self._stop_asked = False

    def alone(self) -> Group:
        """Return the group of this process alone, when the others are gone."""
        group = Group()
        group._stop_asked = self._stop_asked
        return group

    def batches(self, loader: Loader, cursor: Cursor, step: int) -> Iterator[Batch]:
        """Yield this process's part of the loader's batches from `cursor` on.

        Args:
            loader: the data.
            cursor: the first batch.
            step: the number of the step that trains on the first batch.
        """
        return loader.epoch(cursor)

    def cut(self, batch: Batch, shards: int, step: int) -> Cut:
        """Cut the batch of step `step` (or this process's part of it) into shards."""
        return cut_batch(batch, shards)

    def by_the_first(self, function: Callable[[], Path]) -> Path:
        """Call `function` in the first process only; return its result everywhere."""
        return function()

    def pairs_of_all(self, own: Sequence[Pairs], names: Sequence[str]) -> list[Pairs]:
        """Return the metrics of all shards from those of this process's shards."""
        return [*own]

    def outputs_of_all(self, own: Sequence[Batch]) -> list[Batch]:
        """Return the outputs of all shards from those of this process's shards."""
        return [*own]

    def refuse_divergence(self, digests: Callable[[], Mapping[str, str]], step: int) -> None:
        """Compare the state after `step` steps with that of the other processes."""

    def note(self, doing: str) -> None:
        """Publish what this process is doing, for processes that wait for it."""

    def ask_to_stop(self) -> None:
        """Stop all processes before the same step."""
        self._stop_asked = True

    def shall_stop(self, steps_done: int, max_in_flight: int) -> bool:
        """Return whether step `steps_done` must not be taken."""
        return self._stop_asked


class LinkedGroup(Group):
    """One of several processes that train together.

    Args:
        exchange: brings the processes' parts of each step together.
        shards: V, the number of shards of a batch.
    """

    is_alone = False

    def __init__(self, exchange: ProcessReducer, shards: int) -> None:
        super().__init__()
        self.reducer = exchange
        self.is_first = exchange.rank == 0
        self._exchange = exchange
        self._shards = shards
        self._given: Part | None = None  # of the batch that `batches` has yielded last

    def batches(self, loader: Loader, cursor: Cursor, step: int) -> Iterator[Batch]:
        """Yield this process's part of each batch; only that part is loaded."""
        agree(self._exchange.peers, loader.facts(), "the data")

        def part(number: int, examples: int) -> Part:
            return self._part(examples, step + number - cursor.step)

        try:
            for number, batch in enumerate(loader.epoch(cursor, part), cursor.step):
                self._given = part(number, loader.size_of(number))
                yield batch
        finally:
            self._given = None

    def cut(self, batch: Batch, shards: int, step: int) -> Cut:
        """Cut this process's part of the batch of step `step` into shards."""
        return cut_batch(batch, shards, self._given or self._part(count_examples(batch), step))

    def by_the_first(self, function: Callable[[], Path]) -> Path:
        """Call `function` in the first process only; return its result everywhere."""
        return self._exchange.by_the_first(function)

    def pairs_of_all(self, own: Sequence[Pairs], names: Sequence[str]) -> list[Pairs]:
        """Return the metrics of all shards from those of this process's shards."""
        return self._exchange.pairs_of_all(own, names)

    def outputs_of_all(self, own: Sequence[Batch]) -> list[Batch]:
        """Return the outputs of all shards from those of this process's shards."""
        return self._exchange.outputs_of_all(own)

    def refuse_divergence(self, digests: Callable[[], Mapping[str, str]], step: int) -> None:
        """Compare the state after `step` steps with that of the other processes."""
        refuse_divergence(self._exchange.peers, digests(), f"after step {step}")

    def note(self, doing: str) -> None:
        """Publish what this process is doing, for processes that wait for it."""
        self._exchange.note(doing)

    def ask_to_stop(self) -> None:
        """Stop all processes before the same step."""
        super().ask_to_stop()
        self._exchange.stop_asked = True

    def shall_stop(self, steps_done: int, max_in_flight: int) -> bool:
        """Return whether step `steps_done` must not be taken."""
        # The first process to learn of it has at most `max_in_flight` further steps in flight.
        seen = self._exchange.stop_seen
        return seen is not None and steps_done >= seen + max_in_flight

    def _part(self, examples: int, step: int) -> Part:
        bounds = shard_bounds(examples, self._shards)
        runs = self._exchange.assignment.runs(min(examples, self._shards), step)
        return Part(examples, bounds, runs, self._exchange.rank)


@contextlib.contextmanager
def joined(
    replicas: Replicas,
    shards: int,
    timeout_s: float,
    facts: Callable[[], Mapping[str, object]],
    own_speed: Callable[[], float],
    in_flight: int,
) -> Iterator[Group]:
    """Find the other processes, if there are any, and yield the group of all of them.

    Args:
        replicas: the replicas of the model in this process.
        shards: V, the number of shards of a batch.
        timeout_s: the most seconds that any wait for another process may take.
        facts: returns what must be the same everywhere, by name.
        own_speed: returns how many shards a second this process computes; 0 while unknown.
        in_flight: how many steps may be submitted and not finished.

    Raises:
        PeerError: the processes are not all there within the time limit.
        InputError: they are about to train different things.
    """
    peers = join(timeout_s) if was_launched() else None
    if peers is None or peers.size == 1:
        yield Group()
        return
    show_told_in_a_line()
    with peers.board, LauncherWatch(), contextlib.closing(peers.links):
        agree(peers, facts(), "what is trained")
        counts = peers.gather(str(len(replicas.all)).encode(), "its number of devices")
        exchange = ProcessReducer(peers, replicas, [*map(int, counts)], own_speed, in_flight)
        with contextlib.closing(exchange):
            yield LinkedGroup(exchange, shards)
