"""Where the time of the devices went: told by the engine, task by task, kept in an account."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from evenstep.account import Account, DeviceShares
from evenstep.engine import Engine, Span, Task


class NodeTime(NamedTuple):
    """When a lane added the two children of the node [lo, hi) of the tree."""

    lane: int
    lo: int
    hi: int
    began_s: float
    ended_s: float


class StepClock:
    """The times of one step, by `time.perf_counter`.

    Attributes:
        ready_s: when its first examples were where devices can get at them; None before.
        nodes: when the nodes of its tree were summed.
    """

    def __init__(self, ready_s: float | None = None) -> None:
        self.ready_s = ready_s
        self.nodes: list[NodeTime] = []

    def data_are_there(self) -> None:
        """Note that the first examples are there."""
        if self.ready_s is None:
            self.ready_s = time.perf_counter()


class Timekeeper:
    """Keeps the account of an engine's devices, and writes steps and nodes into its trace."""

    def __init__(self, engine: Engine) -> None:
        self._trace = engine.trace
        self._account = Account([device.name for device in engine.devices])
        self._compute = len(engine.devices)
        self._free_s: float | None = None
        self._lock = threading.Lock()
        engine.listener = self._task_ended

    def rest(self) -> None:
        """The devices' time from the last step to the next one's data is not to be counted."""
        self._free_s = None

    def loaded(self, began_s: float) -> None:
        """The front end has fetched a batch since `began_s`."""
        self._trace.add(Span("front end", "load", "load", began_s, time.perf_counter(), None))

    def shard_ended(
        self, lane: int, shard: int, category: str, step: int, began_s: float, stolen: bool
    ) -> None:
        """A lane has computed a shard, just now; called in that lane."""
        now = time.perf_counter()
        story: dict[str, object] = {"step": step, "shard": shard}
        if stolen:
            story["stolen"] = True
        with self._lock:
            self._trace.add(Span(lane, f"shard {shard}", category, began_s, now, story))
            self._account.add(lane, category, now - began_s, shard=True, stolen=stolen)

    def step_ended(self, number: int, clock: StepClock) -> None:
        """A step's update is done, just now; called in its lane."""
        now = time.perf_counter()
        ready_s = now if clock.ready_s is None else clock.ready_s
        opened_s = ready_s if self._free_s is None else self._free_s
        began_s = max(opened_s, ready_s)
        self._free_s = now
        with self._lock:
            self._account.add_step(opened_s, began_s, now)
            for node in clock.nodes:
                self._account.add(node.lane, "sum", node.ended_s - node.began_s)
        if began_s > opened_s:
            self._trace.add(Span("steps", "waiting for data", "wait", opened_s, began_s, None))
        self._trace.add(Span("steps", f"step {number}", "step", began_s, now, {"step": number}))
        for node in clock.nodes:
            name = f"sum [{node.lo},{node.hi})"
            story = {"step": number}
            self._trace.add(Span(node.lane, name, "sum", node.began_s, node.ended_s, story))

    def shares(self) -> tuple[DeviceShares, ...]:
        """Return for each device where its time went."""
        return self._account.shares()

    def _task_ended(self, lane: int, task: Task, seconds: float) -> None:
        """Called by the engine under its lock."""
        if lane < self._compute and task.category == "update":
            with self._lock:
                self._account.add(lane, task.category, seconds)
