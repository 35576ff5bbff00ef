"""Measures where the devices' time goes: noted while a step runs, added up when they are read."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from evenstep.profiling.accounting import Account, Shares
from evenstep.profiling.trace import Kind, Numbers, Trace

ADD_UP_EVERY = 64
"""The number of steps after which their times are added up."""


class ShardTime(NamedTuple):
    """When a lane computed a shard, in seconds of `time.perf_counter`.

    A shard is `stolen` if it was in another lane's run. `stage` is the stage of the network that
    was computed, forward or `backward`; None for all of it.
    """

    lane: int
    shard: int
    stolen: bool
    began_s: float
    ended_s: float
    stage: int | None = None
    backward: bool = False


class NodeTime(NamedTuple):
    """When a lane added up the two children of the node [lo, hi)."""

    lane: int
    lo: int
    hi: int
    began_s: float
    ended_s: float


@dataclasses.dataclass
class StepClock:
    """The times of one attempt at a step, in seconds of `time.perf_counter`.

    Attributes:
        ready_s: when the first examples were where devices can read them; None before.
        shards: when shards were computed; a shard that waited for others, or that went through
            several stages, has several entries.
        nodes: when nodes of the tree were added up.
        update: the lane that ended the step, when it began to, and when the step ended.
        exchange_s: seconds of the end of the step that were spent with other processes.
        opened_s: the earliest time at which the step's data could be used; None before the step is
            added up.
    """

    ready_s: float | None = None
    shards: list[ShardTime] = dataclasses.field(default_factory=list)
    nodes: list[NodeTime] = dataclasses.field(default_factory=list)
    update: tuple[int, float, float] | None = None
    exchange_s: float = 0.0
    opened_s: float | None = None

    def data_are_ready(self) -> None:
        """Note that devices can read the first examples, unless they could before."""
        if self.ready_s is None:
            self.ready_s = time.perf_counter()

    def add(self, evaluation: StepClock) -> None:
        """Add an evaluation of the batch, of several before one update."""
        self.ready_s = evaluation.ready_s if self.ready_s is None else self.ready_s
        self.shards += evaluation.shards
        self.update = evaluation.update

    def times(self, lanes: int) -> tuple[float, list[float]]:
        """Return the seconds of a finished step, and the share of it that each lane was busy."""
        busy_s = [0.0] * lanes
        if self.update is None:  # an error came after the optimizer's step
            return 0.0, busy_s
        lane, update_began_s, ended_s = self.update
        began_s = self.opened_s if self.opened_s is not None else self.ready_s
        seconds = ended_s - (update_began_s if began_s is None else began_s)
        busy_s[lane] = ended_s - update_began_s - self.exchange_s
        for shard in self.shards:
            busy_s[shard.lane] += shard.ended_s - shard.began_s
        return seconds, [min(1.0, max(0.0, one / seconds)) if seconds else 0.0 for one in busy_s]

    def spans(self, step: int, category: str) -> Iterator[Numbers]:
        """Yield a span for each shard, each node and the update of a step."""
        for lane, shard, stolen, began_s, ended_s, stage, backward in self.shards:
            kind = _kind_of_shard(category, stolen, stage is not None, backward)
            facts = [shard, step, shard, *[1] * stolen]
            facts += [] if stage is None else [stage, backward]
            yield kind, lane, began_s, ended_s, facts
        for lane, lo, hi, began_s, ended_s in self.nodes:
            yield _SUM, lane, began_s, ended_s, (lo, hi, step)
        if self.update is not None:
            lane, began_s, ended_s = self.update
            yield _UPDATE, lane, began_s, ended_s, (step, step)


_SUM = Kind(None, ("sum [", ",", ")"), "sum", ("step",))
_UPDATE = Kind(None, ("update ", ""), "update", ("step",))
_STEP = Kind("steps", ("step ", ""), "step", ("step",))
_WAIT = Kind("steps", ("waiting for data",), "wait")
_LOAD = Kind("front end", ("load",), "load")


@functools.cache
def _kind_of_shard(category: str, stolen: bool, of_stage: bool, backward: bool) -> Kind:
    way = (" backward" if backward else " forward") if of_stage else ""
    keys = ("step", "shard", *["stolen"] * stolen, *("stage", "backward")[: 2 * of_stage])
    return Kind(None, ("shard ", way), category, keys, frozenset({"stolen", "backward"}))


class Timekeeper:
    """Keeps the account of devices, and writes steps into a trace.

    Attributes:
        ended: the finished steps that were not added up yet, as (number, clock); None for a rest.
    """

    def __init__(self, trace: Trace, devices: Sequence[str]) -> None:
        self._trace = trace
        self._account = Account(devices)
        self._free_s: float | None = None
        self._lock = threading.RLock()  # the collector's destructors may ask for shares
        self.ended: deque[tuple[int, StepClock] | None] = deque()

    def rest(self) -> None:
        """Leave the time from the last step to the next step's data out of the account."""
        self.ended.append(None)

    def loaded(self, began_s: float) -> None:
        """Note that the user's thread has loaded a batch since `began_s`."""
        self._trace.add_many([(_LOAD, 0, began_s, time.perf_counter(), ())])

    def evaluated(self, clock: StepClock) -> None:
        """Write the shards of an evaluation into the trace."""
        self.add_up()
        self._trace.add_many(clock.spans(0, "evaluate"))

    @property
    def trace(self) -> Trace:
        """What ran where and when, up to the last finished step."""
        self.add_up()
        return self._trace

    def shares(self) -> Shares:
        """Return for each device where its time went."""
        self.add_up()
        return self._account.shares()

    def add_up(self) -> None:
        """Add the finished steps to the account and the trace."""
        with self._lock:
            while self.ended:
                step = self.ended.popleft()
                if step is None:
                    self._free_s = None
                else:
                    self._add_step(*step)

    def _add_step(self, number: int, clock: StepClock) -> None:
        assert clock.update is not None
        lane, update_began_s, now = clock.update
        ready_s = now if clock.ready_s is None else clock.ready_s
        opened_s = clock.opened_s = ready_s if self._free_s is None else self._free_s
        began_s = max(opened_s, ready_s)
        self._free_s = now
        account = self._account
        account.add_step(opened_s, began_s, now)
        seen: set[tuple[int, int]] = set()
        for time_ in clock.shards:
            new = (time_.lane, time_.shard) not in seen
            seen.add((time_.lane, time_.shard))
            seconds = time_.ended_s - time_.began_s
            account.add(time_.lane, "compute", seconds, shards=new, stolen=time_.stolen)
        for node in clock.nodes:
            account.add(node.lane, "sum", node.ended_s - node.began_s)
        account.add(lane, "update", now - update_began_s - clock.exchange_s)
        spans: list[Numbers] = [(_STEP, 0, began_s, now, (number, number))]
        if began_s > opened_s:
            spans.insert(0, (_WAIT, 0, opened_s, began_s, ()))
        self._trace.add_many([*spans, *clock.spans(number, "compute")])
