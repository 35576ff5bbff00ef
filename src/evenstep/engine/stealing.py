"""Work stealing: lanes work on runs of items, and idle lanes take items from the runs of others.

A lane takes the items of its own run from the front. A lane whose run is empty takes the last item
of the run that is expected to end last, if it would finish that item earlier. Stealing changes when
an item is computed, never its result. (Blumofe and Leiserson, "Scheduling Multithreaded
Computations by Work Stealing", 1999, also steal from the far end.) No threads and no clock: the
time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

_RECENT = 0.3  # the share of the newest duration in a lane's moving average
_FORGET = 0.995  # factor on an idle lane's duration each time it was assigned nothing
_LATE = 20  # an item is stuck after so many times its usual duration


class Pace:
    """How many seconds an item of each kind takes on each lane, as moving averages."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._seconds: dict[str, list[float | None]] = {}

    def of(self, lane: int, kind: str) -> float | None:
        """Return the seconds that `lane` takes; None before the first measurement."""
        seconds = self._seconds.get(kind)
        return seconds[lane] if seconds else None

    def slowest(self, kind: str) -> float:
        """Return the seconds that the slowest lane takes; 0 before the first measurement."""
        return max((seconds or 0.0 for seconds in self._seconds.get(kind, ())), default=0.0)

    def learn(self, lane: int, kind: str, took_s: float) -> None:
        """Record how long an item took."""
        seconds = self._seconds.get(kind)
        if seconds is None:
            seconds = self._seconds[kind] = [None] * self._lanes
        before = seconds[lane]
        seconds[lane] = took_s if before is None else before + _RECENT * (took_s - before)

    def speeds(self, kind: str, lost: Collection[int] = ()) -> list[float]:
        """Return the relative speeds of the lanes.

        A lane without a measurement counts as fast as the fastest one; a lost lane has speed 0.
        """
        seconds = self._seconds.get(kind, [None] * self._lanes)
        known = [took for lane, took in enumerate(seconds) if took and lane not in lost]
        best = min(known, default=1.0)
        return [0.0 if lane in lost else 1 / (took or best) for lane, took in enumerate(seconds)]

    def total_speed(self, kind: str, lost: Collection[int] = ()) -> float:
        """Return the items per second of all lanes together; 0 until each was measured."""
        seconds = self._seconds.get(kind, [None] * self._lanes)
        alive = [took for lane, took in enumerate(seconds) if lane not in lost]
        return sum(1 / took for took in alive if took) if all(alive) else 0.0

    def forget_idle(self, kind: str, lanes: Iterable[int]) -> None:
        """Shorten the recorded durations of `lanes`, which were assigned nothing.

        So a lane that was slow for a while is assigned items again later.
        """
        if seconds := self._seconds.get(kind):
            for lane in lanes:
                took = seconds[lane]
                seconds[lane] = took and took * _FORGET


class Runs(Generic[T]):
    """The items that each lane still has to compute, and the item that it is computing.

    Args:
        lanes: number of lanes.
        pace: how long items take on each lane.
        kind_of: returns an item's kind; items of one kind take about the same time.
    """

    def __init__(self, lanes: int, pace: Pace, kind_of: Callable[[T], str]) -> None:
        self._runs: list[deque[T]] = [deque() for _ in range(lanes)]
        self._since: list[tuple[T, float] | None] = [None] * lanes
        self._own_first: set[int] = set()
        self._pace = pace
        self._kind_of = kind_of

    def __bool__(self) -> bool:
        """Whether there is an item that no lane has begun."""
        return any(self._runs)

    def add(self, lane: int, item: T) -> None:
        """Append an item to a lane's run."""
        self._runs[lane].append(item)

    def leave_first(self, lane: int) -> None:
        """Protect the first item of a lane's run from being stolen."""
        self._own_first.add(lane)

    def first(self, lane: int) -> T | None:
        """Return the next item of a lane's run without taking it; None if the run is empty."""
        run = self._runs[lane]
        return run[0] if run else None

    def take(self, lane: int) -> T:
        """Take the next item of a lane's run."""
        self._own_first.discard(lane)
        return self._runs[lane].popleft()

    def steal(self, thief: int, now: float) -> T | None:
        """Take the last item of the run that ends last, if `thief` would finish it earlier."""
        victim, longest_s = -1, -1.0
        for lane, run in enumerate(self._runs):
            may_go = len(run) - (lane in self._own_first)
            if may_go > 0 and (left_s := self._left_s(lane, now)) > longest_s:
                victim, longest_s = lane, left_s
        if victim < 0:
            return None
        pace = self._pace.of(thief, self._kind_of(self._runs[victim][-1]))
        if pace is not None and pace >= longest_s:
            return None
        return self._runs[victim].pop()

    def begin(self, lane: int, item: T, now: float) -> None:
        """Record that a lane has begun an item."""
        self._since[lane] = (item, now)

    def end(self, lane: int, now: float) -> None:
        """Record that a lane has finished its item, and how long it took."""
        since, self._since[lane] = self._since[lane], None
        if since is not None:
            self._pace.learn(lane, self._kind_of(since[0]), now - since[1])

    def drop(self, lane: int) -> None:
        """Record that a lane has abandoned its item."""
        self._since[lane] = None

    def stuck(self, alive: Collection[int], after_s: float, now: float) -> list[int]:
        """Return the lanes that have been computing an item for too long while another is idle.

        Too long is more than `after_s` and more than twenty times the slowest lane's usual
        duration. Before the first measurement no lane is stuck.
        """
        at_work = [(lane, *since) for lane in alive if (since := self._since[lane]) is not None]
        if len(at_work) == len(alive):
            return []
        stuck = []
        for lane, item, began in at_work:
            usual = self._pace.slowest(self._kind_of(item))
            if usual and now - began > max(after_s, _LATE * usual):
                stuck.append(lane)
        return stuck

    def _left_s(self, lane: int, now: float) -> float:
        """Estimate the seconds until a lane has finished its current item and its run."""
        run = self._runs[lane]
        pace = self._pace.of(lane, self._kind_of(run[-1]))
        if pace is None:
            return float("inf")
        since = self._since[lane]
        # A late item is expected to take as long again as it is late already.
        current = abs(pace - (now - since[1])) if since else 0.0
        return current + pace * len(run)
