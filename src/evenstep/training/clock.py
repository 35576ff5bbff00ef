"""Measures where the devices' time goes: noted while a step runs, added up when somebody looks."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from evenstep.batch.stealing import ShardTime
from evenstep.engine import Engine
from evenstep.profiling.accounting import Account, DeviceShares
from evenstep.profiling.trace import Span, Trace

_ADD_UP_EVERY = 64  # steps


class NodeTime(NamedTuple):
    """When a lane added up the two children of the node [lo, hi)."""

    lane: int
    lo: int
    hi: int
    began_s: float
    ended_s: float


class StepClock:
    """The times of one attempt at a step, in seconds of `time.perf_counter`.

    Attributes:
        ready_s: when the first examples were where devices can read them; None before.
        shards: when shards were computed; a shard that waited for others has several entries.
        nodes: when nodes of the tree were added up.
        update: the lane that ended the step, when it began to, and when the step ended.
        exchange_s: seconds of the end of the step that were spent with other processes.
    """

    def __init__(self, ready_s: float | None = None) -> None:
        self.ready_s = ready_s
        self.shards: list[ShardTime] = []
        self.nodes: list[NodeTime] = []
        self.update: tuple[int, float, float] | None = None
        self.exchange_s = 0.0

    def data_are_ready(self) -> None:
        """Note that devices can read the first examples, unless they could before."""
        if self.ready_s is None:
            self.ready_s = time.perf_counter()

    def spans(self, number: int, category: str) -> Iterator[Span]:
        """Yield a span for each shard, each node and the update of step `number`."""
        for time_ in self.shards:
            story: dict[str, object] = {"step": number, "shard": time_.shard}
            if time_.stolen:
                story["stolen"] = True
            name = f"shard {time_.shard}"
            yield Span(time_.lane, name, category, time_.began_s, time_.ended_s, story)
        for lane, lo, hi, began_s, ended_s in self.nodes:
            yield Span(lane, f"sum [{lo},{hi})", "sum", began_s, ended_s, {"step": number})
        if self.update is not None:
            lane, began_s, ended_s = self.update
            yield Span(lane, f"update {number}", "update", began_s, ended_s, {"step": number})


class Timekeeper:
    """Keeps the account of an engine's devices, and writes steps into its trace.

    Attributes:
        rested: whether the devices' time since the last step is not to be counted.
    """

    def __init__(self, engine: Engine) -> None:
        self._trace = engine.trace
        self._account = Account([device.name for device in engine.devices])
        self._free_s: float | None = None
        self._ended: list[tuple[int, StepClock, bool]] = []
        self._lock = threading.Lock()
        self.rested = True

    def rest(self) -> None:
        """Leave the time from the last step to the next step's data out of the account."""
        self.rested = True

    def loaded(self, began_s: float) -> None:
        """Note that the user's thread has loaded a batch since `began_s`."""
        self._trace.add(Span("front end", "load", "load", began_s, time.perf_counter(), None))

    def step_ended(self, number: int, clock: StepClock) -> None:
        """Note a finished step; called in the lane that ended it."""
        with self._lock:
            self._ended.append((number, clock, self.rested))
            self.rested = False
        if len(self._ended) >= _ADD_UP_EVERY:
            self._add_up()

    def evaluated(self, clock: StepClock) -> None:
        """Write the shards of an evaluation into the trace."""
        self._add_up()
        self._write(0, clock, "evaluate")

    @property
    def trace(self) -> Trace:
        """What ran where and when, up to the last finished step."""
        self._add_up()
        return self._trace

    def shares(self) -> tuple[DeviceShares, ...]:
        """Return for each device where its time went."""
        self._add_up()
        return self._account.shares()

    def _add_up(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
            for number, clock, rested in ended:
                self._add_step(number, clock, rested=rested)

    def _add_step(self, number: int, clock: StepClock, *, rested: bool) -> None:
        assert clock.update is not None
        lane, update_began_s, now = clock.update
        ready_s = now if clock.ready_s is None else clock.ready_s
        opened_s = ready_s if rested or self._free_s is None else self._free_s
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
        if began_s > opened_s:
            self._trace.add(Span("steps", "waiting for data", "wait", opened_s, began_s, None))
        self._trace.add(Span("steps", f"step {number}", "step", began_s, now, {"step": number}))
        self._write(number, clock, "compute")

    def _write(self, number: int, clock: StepClock, category: str) -> None:
        count = len(clock.shards) + len(clock.nodes) + (clock.update is not None)
        self._trace.add_later(count, functools.partial(_spans, clock, number, category))


def _spans(clock: StepClock, number: int, category: str) -> list[Span]:
    return [*clock.spans(number, category)]
