"""Which shard a stage's device computes next: the order of a pipeline, and the waiting for it.

Every shard visits the stages in turn: forward from the first to the last, backward from the last to
the first. A device computes one shard at a time. It prefers a backward pass to a forward pass, and
an early shard to a late one; and stage s of S begins no forward pass while S − s shards are past
theirs and still hold activations there. That is "one forward, one backward" (1F1B: PipeDream,
Narayanan et al., SOSP 2019; 2021, arXiv:2104.04473), but with the shards that happen to wait
instead of a fixed schedule: the order of the shards has no effect on the result.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from evenstep.shard.lockstep import StoppedError


class TurnOrder:
    """The turns of the shards on the stages of one replica. No threads, no clock.

    Args:
        stages: S, the number of stages.

    Attributes:
        running: for each stage the shard whose turn it is; None while it is free.
        holding: for each stage the shards that hold activations there.
    """

    def __init__(self, stages: int) -> None:
        self.running: list[int | None] = [None] * stages
        self.holding: list[set[int]] = [set() for _ in range(stages)]
        self._waiting: list[dict[int, bool]] = [{} for _ in range(stages)]  # is it for a backward?

    def ask(self, shard: int, stage: int, *, backward: bool) -> None:
        """Note that a shard waits for its turn on a stage, forward or backward."""
        self._waiting[stage][shard] = backward

    def leave(self, shard: int, stage: int, *, holds: bool) -> None:
        """End a shard's turn on a stage; `holds` says whether its activations stay there."""
        assert self.running[stage] == shard
        self.running[stage] = None
        if not holds:
            self.holding[stage].discard(shard)

    def end(self, shard: int) -> None:
        """Forget a shard, wherever it is."""
        for stage, holding in enumerate(self.holding):
            holding.discard(shard)
            self._waiting[stage].pop(shard, None)
            if self.running[stage] == shard:
                self.running[stage] = None

    def begin(self) -> list[int]:
        """Give every free stage to the shard that comes next; return the shards that got one."""
        begun = []
        for stage, waiting in enumerate(self._waiting):
            may = [one for one in waiting if waiting[one] or self._may_begin(one, stage)]
            if self.running[stage] is None and may:
                shard = min(may, key=lambda one: (not waiting[one], one))
                del waiting[shard]
                self.running[stage] = shard
                self.holding[stage].add(shard)
                begun.append(shard)
        return begun

    def _may_begin(self, shard: int, stage: int) -> bool:
        """Return whether a shard may go forward on a stage without holding too much there."""
        holding = self.holding[stage]
        return shard in holding or len(holding) < len(self.running) - stage


class Place(NamedTuple):
    """A shard's turn: on which stage, and whether for its backward pass."""

    stage: int
    backward: bool


class Turns:
    """Makes each shard's thread wait for its turn.

    Args:
        stages: S, the number of stages.
    """

    def __init__(self, stages: int) -> None:
        self.order = TurnOrder(stages)
        self._lock = threading.Lock()
        self._gates: dict[int, threading.Lock] = {}
        self._stopped = False

    def move(self, shard: int, before: Place | None, after: Place, *, holds: bool) -> None:
        """End a shard's turn and wait for its next one.

        Args:
            shard: the shard's number.
            before: its turn until now; None for a shard that begins.
            after: the turn to wait for.
            holds: whether its activations stay at `before`.

        Raises:
            StoppedError: the step was stopped.
        """
        with self._lock:
            gate = self._gates.setdefault(shard, _closed_gate())
            if before is not None:
                self.order.leave(shard, before.stage, holds=holds)
            self.order.ask(shard, after.stage, backward=after.backward)
            self._open_gates()
        gate.acquire()
        if self._stopped:
            raise StoppedError

    def end(self, shard: int) -> None:
        """End a shard's last turn."""
        with self._lock:
            self._gates.pop(shard, None)
            self.order.end(shard)
            self._open_gates()

    def stop(self) -> None:
        """End every shard that waits for its turn now, and every other one when it would wait."""
        with self._lock:
            self._stopped = True
            for gate in self._gates.values():
                _open(gate)

    def _open_gates(self) -> None:
        begun: Iterable[int] = self._gates if self._stopped else self.order.begin()
        for shard in begun:
            _open(self._gates[shard])


class FreeTurns(Turns):
    """Lets every shard go on at once: on accelerators, code launches kernels and waits for none.

    Each shard has streams of its own, so the devices order the kernels of several shards.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def move(self, shard: int, before: Place | None, after: Place, *, holds: bool) -> None:
        """Go on.

        Raises:
            StoppedError: the step was stopped.
        """
        if self._stopped:
            raise StoppedError

    def end(self, shard: int) -> None:
        """Do nothing."""


class StagedShards:
    """The shards of one attempt at a step: those that no thread has begun, and the others' turns.

    Args:
        runs: for each replica, the shards that it computes, in order.
        make_turns: makes the turns of a replica's shards.
    """

    def __init__(self, runs: Sequence[Sequence[int]], make_turns: Callable[[], Turns]) -> None:
        self.turns = [make_turns() for _ in runs]
        self._runs = [deque(run) for run in runs]
        self._stopped = False

    def next(self, replica: int) -> int | None:
        """Return the next shard of a replica's run; None for no more."""
        run = self._runs[replica]
        try:
            return None if self._stopped else run.popleft()
        except IndexError:
            return None

    def stop(self) -> None:
        """Let no further shard begin, and no shard wait for its turn."""
        self._stopped = True
        for turns in self.turns:
            turns.stop()


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _open(gate: threading.Lock) -> None:
    if gate.locked():
        gate.release()
