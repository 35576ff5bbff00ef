"""A step on its way: its goes at the minibatch, what came of them, and the handle of its loss."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from evenstep.batch import Cut
from evenstep.batch.cut import NO_CUT
from evenstep.collectives import Forest, TreeSum, forest
from evenstep.data import Cursor
from evenstep.distributed.gradient_reduce import Sending
from evenstep.engine import Pending, Runs, Task
from evenstep.shard.compiler import Program
from evenstep.shard.forward_backward import Leaf, NodeSum
from evenstep.shard.lockstep import Lockstep
from evenstep.shard.loss import ShardObjective
from evenstep.shard.random_ops import States
from evenstep.training.clock import StepClock
from evenstep.training.step_exchange import Place

SeedOf: TypeAlias = Callable[[int], int]
"""The seed of the random ops of a shard, by its number."""


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


@dataclasses.dataclass(eq=False, kw_only=True)
class StepRun:
    """A step on its way.

    Attributes:
        number: steps done before it.
        cursor: its place in the data.
        attempt: the current go at its batch.
        objective: of a shard.
        seed_of: seeds of the shards' random ops.
        observe: called with every shard's own value.
        finish: called in a lane with the step, the leaves' losses and the root of the tree.
        settings: what the front end changed in the optimizer since the step before.
        end: its last task.
        loss: its mean loss, once it is finished.
        finished: whether `finish` is through.
        error: why it was abandoned.
    """

    number: int
    cursor: Cursor
    attempt: Attempt
    objective: ShardObjective
    seed_of: SeedOf
    observe: Callable[[int, NodeSum], None] | None
    finish: Callable[[StepRun, Sequence[Leaf | None], NodeSum], None]
    settings: Sequence[Any] = ()
    end: Task | None = None
    loss: float = math.nan
    finished: bool = False
    error: BaseException | None = None

    @property
    def place(self) -> Place:
        """What of the step must be the same in every process."""
        part = self.attempt.cut.part
        ends = (run.stop for run in part.runs)
        return (self.number, self.cursor.epoch, self.cursor.step, part.examples, *ends)

    def let_go(self) -> None:
        """Forget the batch: whoever keeps the loss of a step must not keep its examples."""
        self.attempt.cut = NO_CUT


class StepLoss(Pending):
    """The mean loss of a step, before its update: a handle."""

    __slots__ = ("_complete", "_run")

    def __init__(self, run: StepRun, complete: Callable[[StepRun], None]) -> None:
        self._run = run
        self._complete = complete

    @property
    def told(self) -> str:
        """What it is, in a task's story."""
        return f"the loss of step {self._run.number}"

    def value_in_task(self) -> float:
        """Return the loss; only called once it is there."""
        return self._run.loss

    def wait_to_read(self) -> None:
        """Block until the step is finished; raise its error."""
        if not self._run.finished and self._run.error is None:
            self._complete(self._run)
        if self._run.error is not None:
            raise self._run.error

    def __repr__(self) -> str:
        return f"Handle({self.item()})"
