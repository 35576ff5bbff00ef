"""Work that lanes own in runs and steal from each other: a pure record, told the time.

A lane works its run off from the front. A lane with nothing left takes the last item of the run
that will end last, if it would be done with it before that run is. Stealing moves time and never
results. (Blumofe and Leiserson, "Scheduling Multithreaded Computations by Work Stealing", 1999,
steal from the far end too.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

_RECENT = 0.3  # the share of the newest duration in a lane's moving average
_FORGET = 0.995  # what an idle lane's pace shrinks by for each time it got nothing
_LATE = 20  # times the usual duration after which an item is stuck


class Pace:
    """How many seconds an item of a kind takes on each lane: moving averages."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._seconds: dict[str, list[float | None]] = {}

    def of(self, lane: int, kind: str) -> float | None:
        """Return the seconds that `lane` needs; None before anything was measured there."""
        seconds = self._seconds.get(kind)
        return seconds[lane] if seconds else None

    def slowest(self, kind: str) -> float:
        """Return the seconds that the slowest lane needs; 0 before anything was measured."""
        return max((seconds or 0.0 for seconds in self._seconds.get(kind, ())), default=0.0)

    def learn(self, lane: int, kind: str, took_s: float) -> None:
        """Note what an item took."""
        seconds = self._seconds.get(kind)
        if seconds is None:
            seconds = self._seconds[kind] = [None] * self._lanes
        before = seconds[lane]
        seconds[lane] = took_s if before is None else before + _RECENT * (took_s - before)

    def speeds(self, kind: str, lost: Collection[int] = ()) -> list[float]:
        """Return how fast each lane is, relative to each other.

        A lane that was not yet measured counts as the fastest one does; a lost one has 0.
        """
        seconds = self._seconds.get(kind, [None] * self._lanes)
        known = [took for lane, took in enumerate(seconds) if took and lane not in lost]
        best = min(known, default=1.0)
        return [0.0 if lane in lost else 1 / (took or best) for lane, took in enumerate(seconds)]

    def total_speed(self, kind: str, lost: Collection[int] = ()) -> float:
        """Return how many items a second all lanes do together; 0 while one isn't measured."""
        seconds = self._seconds.get(kind, [None] * self._lanes)
        alive = [took for lane, took in enumerate(seconds) if lane not in lost]
        return sum(1 / took for took in alive if took) if all(alive) else 0.0

    def forget_idle(self, kind: str, lanes: Iterable[int]) -> None:
        """Trust the pace of `lanes`, which were given nothing, a little less.

        So a lane that was slow for a while is tried again some day.
        """
        if seconds := self._seconds.get(kind):
            for lane in lanes:
                took = seconds[lane]
                seconds[lane] = took and took * _FORGET


class Runs(Generic[T]):
    """The items that lanes have before them, and what each is at.

    Args:
        lanes: how many.
        pace: how fast they are.
        kind_of: an item's kind; items of a kind take about the same time.
    """

    def __init__(self, lanes: int, pace: Pace, kind_of: Callable[[T], str]) -> None:
        self._runs: list[deque[T]] = [deque() for _ in range(lanes)]
        self._since: list[tuple[T, float] | None] = [None] * lanes
        self._own_first: set[int] = set()
        self._pace = pace
        self._kind_of = kind_of

    def __bool__(self) -> bool:
        """Whether there is anything that no lane has begun."""
        return any(self._runs)

    def add(self, lane: int, item: T) -> None:
        """Put an item at the end of a lane's run."""
        self._runs[lane].append(item)

    def leave_first(self, lane: int) -> None:
        """Have a lane begin its run itself, whatever is stolen from the end."""
        self._own_first.add(lane)

    def first(self, lane: int) -> T | None:
        """Return the next item of a lane's own run, and leave it there."""
        run = self._runs[lane]
        return run[0] if run else None

    def take(self, lane: int) -> T:
        """Take the next item of a lane's own run."""
        self._own_first.discard(lane)
        return self._runs[lane].popleft()

    def take_all(self, lane: int) -> list[T]:
        """Take what is left of a lane's run."""
        run, self._runs[lane] = self._runs[lane], deque()
        return [*run]

    def steal(self, thief: int, now: float) -> T | None:
        """Take the last item of the run that will end last, if the thief would be done before."""
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
        """Note that a lane has begun an item."""
        self._since[lane] = (item, now)

    def end(self, lane: int, now: float) -> None:
        """Note that a lane is done with its item, and what it took."""
        since, self._since[lane] = self._since[lane], None
        if since is not None:
            self._pace.learn(lane, self._kind_of(since[0]), now - since[1])

    def drop(self, lane: int) -> None:
        """Note that a lane has given its item up."""
        self._since[lane] = None

    def stuck(self, alive: Collection[int], after_s: float, now: float) -> list[int]:
        """Return the lanes that are at an item too long while another one has none.

        Too long is `after_s`, and twenty times what the slowest lane usually takes; before anything
        was measured nothing is too long.
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
        """Guess the seconds until a lane has done what it is at and its run."""
        run = self._runs[lane]
        pace = self._pace.of(lane, self._kind_of(run[-1]))
        if pace is None:
            return float("inf")
        since = self._since[lane]
        # An item that is late: as late as it is, as long it may still take.
        current = abs(pace - (now - since[1])) if since else 0.0
        return current + pace * len(run)
