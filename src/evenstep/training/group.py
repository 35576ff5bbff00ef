"""The processes that train together, seen from one of them; alone, unless a launcher started more.

What a process has to know besides its own devices: which shards are its own, what it fetches of a
batch, what only one process does, and when all stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from evenstep.batch import Batch, Part, count_examples, shard_bounds
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
from evenstep.training.step_exchange import Exchange


class Team:
    """The processes of a job, from when they are linked on; before that this one is alone.

    Args:
        shards: V.

    Attributes:
        exchange: with the others; None for a process that is alone.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._stop_asked = False
        self.exchange: Exchange | None = None
        self._given: Part | None = None  # of the batch that `batches` has yielded last

    @contextlib.contextmanager
    def linked(
        self,
        replicas: Replicas,
        timeout_s: float,
        facts: Callable[[], Mapping[str, object]],
        own_speed: Callable[[], float],
        in_flight: int,
    ) -> Iterator[None]:
        """Find the other processes, if there are any, and make sure that all train the same.

        Args:
            replicas: of the model.
            timeout_s: the most seconds that any wait for another process may take.
            facts: what must be the same everywhere, by name.
            own_speed: says how many shards a second this process computes; 0 while it isn't known.
            in_flight: how many steps may be begun and not finished.

        Raises:
            PeerError: the processes are not all there within the time limit.
            InputError: they are about to train different things.
        """
        peers = join(timeout_s) if was_launched() else None
        if peers is None or peers.size == 1:
            yield
            return
        show_told_in_a_line()
        with peers.board, LauncherWatch(), contextlib.closing(peers.links):
            agree(peers, facts(), "what is trained")
            told = peers.gather(str(len(replicas.all)).encode(), "its number of devices")
            devices = [int(count) for count in told]
            self.exchange = Exchange(peers, replicas, devices, own_speed, in_flight)
            try:
                yield
            finally:
                self.exchange.close()
                self.exchange = None

    def batches(self, loader: Loader, cursor: Cursor, step: int) -> Iterator[Batch]:
        """Yield the loader's batches from `cursor` on, as steps from `step` on.

        Of several processes each gets, and fetches, its own part of each.
        """
        if self.exchange is None:
            yield from loader.epoch(cursor)
            return

        agree(self.exchange.peers, loader.facts(), "the data")

        def part(number: int, examples: int) -> Part:
            return self._part(examples, step + number - cursor.step)

        try:
            for number, batch in enumerate(loader.epoch(cursor, part), cursor.step):
                self._given = part(number, loader.size_of(number))
                yield batch
        finally:
            self._given = None

    def part_of_batch(self, batch: Batch, step: int) -> Part | None:
        """Return what this process has of the batch of a step; None if it is alone."""
        if self.exchange is None:
            return None
        return self._given or self._part(count_examples(batch), step)

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.exchange is None or self.exchange.rank == 0

    def by_the_first(self, function: Callable[[], Path]) -> Path:
        """Have the first process call `function`; return everywhere what it returned."""
        return self.exchange.by_the_first(function) if self.exchange else function()

    def refuse_divergence(self, digests: Callable[[], Mapping[str, str]], step: int) -> None:
        """Compare the state after `step` steps with that of the other processes."""
        if self.exchange:
            refuse_divergence(self.exchange.peers, digests(), f"after step {step}")

    def note(self, doing: str) -> None:
        """Say what this process is doing from now on, for others that wait for it."""
        if self.exchange:
            self.exchange.note(doing)

    def ask_to_stop(self) -> None:
        """Have all processes stop before the same step."""
        self._stop_asked = True
        if self.exchange:
            self.exchange.stop_asked = True

    def shall_stop(self, steps_done: int, max_in_flight: int) -> bool:
        """Say whether step `steps_done` must not be taken any more."""
        if self.exchange is None:
            return self._stop_asked
        # Who hears of it first has at most so many more steps on their way.
        seen = self.exchange.stop_seen
        return seen is not None and steps_done >= seen + max_in_flight

    def _part(self, examples: int, step: int) -> Part:
        assert self.exchange is not None
        bounds = shard_bounds(examples, self._shards)
        runs = self.exchange.dealing.runs(min(examples, self._shards), step)
        return Part(examples, bounds, runs, self.exchange.rank)
