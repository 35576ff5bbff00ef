"""One go at a minibatch: which shards are left, who is at which, and what they have come to."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping

from evenstep.collectives import Forest, TreeSum, forest
from evenstep.compiled import Program
from evenstep.compute import NodeSum
from evenstep.dense import Sending
from evenstep.draws import States
from evenstep.engine import Runs
from evenstep.lockstep import Lockstep
from evenstep.sharding import Cut
from evenstep.timing import StepClock


@dataclasses.dataclass(eq=False)
class Attempt:
    """One go at a batch's shards; where it fails half-way it is thrown away whole.

    Attributes:
        cut: the batch.
        number: of the step.
        clock: its times.
        runs: the shards that no lane has begun.
        tree: the sum over its shards (of a training step).
        dropped: whether what has not begun of it shall not begin.
        before: the states of the default generators when it began; None where nobody looks.
        told: whether the other processes were told how it went.
        sending: where its gradients go, where there are other processes.
        programs: the compiled shards, by their sizes; none where they are computed eagerly.
        lockstep: where its shards meet, if they go through the step side by side.
    """

    cut: Cut
    number: int = 0
    clock: StepClock = dataclasses.field(default_factory=StepClock)
    runs: Runs[int] | None = None
    tree: TreeSum[NodeSum] | None = None
    dropped: bool = False
    before: States | None = None
    told: bool = False
    sending: Sending | None = None
    programs: Mapping[int, Program] = dataclasses.field(default_factory=dict)
    lockstep: Lockstep | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _at: dict[int, tuple[int, bool, float]] = dataclasses.field(default_factory=dict)

    @property
    def trees(self) -> Forest:
        """Which process sums what of it."""
        return forest(len(self.cut.bounds), self.cut.filled, self.cut.part.runs)

    def afresh(self) -> Attempt:
        """Return another go at the same batch."""
        return Attempt(self.cut, self.number, StepClock(self.clock.ready_s))

    def drop(self) -> None:
        """Let no further shard begin, and none wait for another one."""
        self.dropped = True
        if self.lockstep is not None:
            self.lockstep.stop()

    def next_shard(self, lane: int) -> int | None:
        """End the shard that a lane was at, if any; return its next one, or None for no more."""
        runs, now = self.runs, time.perf_counter()
        assert runs is not None
        with self.lock:
            at = self._at.pop(lane, None)
            if at is not None:
                runs.end(lane, now)
                self.clock.shards.append((lane, *at, now))
            if self.dropped:
                return None
            stolen = runs.first(lane) is None
            shard = runs.steal(lane, now) if stolen else runs.take(lane)
            if shard is not None:
                runs.begin(lane, shard, now)
                self._at[lane] = (shard, stolen, now)
        return shard

    def stuck_lanes(self, alive: set[int], after_s: float) -> list[int]:
        """Return the lanes that are at a shard too long while another one has none."""
        if self.runs is None:
            return []
        with self.lock:
            return self.runs.stuck(alive, after_s, time.perf_counter())
