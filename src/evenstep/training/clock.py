"""Where the time of the devices went: noted while a step runs, told to account and trace then."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import TypeAlias

from evenstep.engine import Engine, Task
from evenstep.profiling.accounting import Account, DeviceShares
from evenstep.profiling.trace import Span

ShardTime: TypeAlias = "tuple[int, int, bool, float, float]"
"""Of a shard: the lane, its number, whether it was from another lane's run, began_s, ended_s."""

NodeTime: TypeAlias = "tuple[int, int, int, float, float]"
"""Of a sum of two children: the lane, the node [lo, hi), began_s, ended_s."""


class StepClock:
    """The times of one step, by `time.perf_counter`; noted in the lanes.

    Attributes:
        ready_s: when its first examples were where devices can get at them; None before.
        shards: when its shards were computed; one that had to wait for others comes in pieces.
        nodes: when the nodes of its tree were summed.
        exchange_s: seconds that its last task was with other processes.
    """

    def __init__(self, ready_s: float | None = None) -> None:
        self.ready_s = ready_s
        self.shards: list[ShardTime] = []
        self.nodes: list[NodeTime] = []
        self.exchange_s = 0.0

    def data_are_there(self) -> None:
        """Note that the first examples are there."""
        if self.ready_s is None:
            self.ready_s = time.perf_counter()

    def spans(self, number: int, category: str) -> Iterator[Span]:
        """Yield a span for each shard, and for each node, of step `number`."""
        for lane, shard, stolen, began_s, ended_s in self.shards:
            story = {"step": number, "shard": shard, **({"stolen": True} if stolen else {})}
            yield Span(lane, f"shard {shard}", category, began_s, ended_s, story)
        for lane, lo, hi, began_s, ended_s in self.nodes:
            yield Span(lane, f"sum [{lo},{hi})", "sum", began_s, ended_s, {"step": number})


class Timekeeper:
    """Keeps the account of an engine's devices, and writes steps into its trace."""

    def __init__(self, engine: Engine) -> None:
        self._trace = engine.trace
        self._account = Account([device.name for device in engine.devices])
        self._compute = len(engine.devices)
        self._free_s: float | None = None
        self._exchange_s = 0.0  # of the step whose last task is about to end
        self._lock = threading.Lock()
        engine.listener = self._task_ended

    def rest(self) -> None:
        """The devices' time from the last step to the next one's data is not to be counted."""
        self._free_s = None

    def loaded(self, began_s: float) -> None:
        """The front end has fetched a batch since `began_s`."""
        self._trace.add(Span("front end", "load", "load", began_s, time.perf_counter(), None))

    def step_ended(self, number: int, clock: StepClock) -> None:
        """A step's update is done, just now; called in its lane."""
        now = time.perf_counter()
        ready_s = now if clock.ready_s is None else clock.ready_s
        opened_s = ready_s if self._free_s is None else self._free_s
        began_s = max(opened_s, ready_s)
        self._free_s = now
        self._exchange_s = clock.exchange_s
        computed, summed = [0.0] * self._compute, [0.0] * self._compute
        shards = [set[int]() for _ in range(self._compute)]
        stolen = [0] * self._compute
        for lane, shard, was_stolen, start_s, end_s in clock.shards:
            computed[lane] += end_s - start_s
            shards[lane].add(shard)
            stolen[lane] += was_stolen
        for lane, _, _, start_s, end_s in clock.nodes:
            summed[lane] += end_s - start_s
        with self._lock:
            self._account.add_step(opened_s, began_s, now)
            for lane in range(self._compute):
                self._account.add(
                    lane, "compute", computed[lane], shards=len(shards[lane]), stolen=stolen[lane]
                )
                self._account.add(lane, "sum", summed[lane])
        if began_s > opened_s:
            self._trace.add(Span("steps", "waiting for data", "wait", opened_s, began_s, None))
        self._trace.add(Span("steps", f"step {number}", "step", began_s, now, {"step": number}))
        self.noted(number, clock, "compute")

    def noted(self, number: int, clock: StepClock, category: str) -> None:
        """Write the shards of a step, or of an evaluation, into the trace."""
        count = len(clock.shards) + len(clock.nodes)
        self._trace.add_later(count, functools.partial(_listed, clock, number, category))

    def shares(self) -> tuple[DeviceShares, ...]:
        """Return for each device where its time went."""
        return self._account.shares()

    def _task_ended(self, lane: int, task: Task, seconds: float) -> None:
        """Called by the engine at the end of each task."""
        if lane < self._compute and task.category == "update":
            own_s, self._exchange_s = seconds - self._exchange_s, 0.0
            with self._lock:
                self._account.add(lane, task.category, own_s)


def _listed(clock: StepClock, number: int, category: str) -> list[Span]:
    return [*clock.spans(number, category)]
