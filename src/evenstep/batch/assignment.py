"""Assigns shards to processes and devices, in proportion to their speeds.

Processes compute the same assignment from the same reported speeds. Inside a process every device
starts with a contiguous run of shards, or with pairs of neighbours in turn where devices share a
memory, and computes them from the front. A device whose run is empty
takes the last shard of the run that is expected to finish last, unless that run's own device would
finish it sooner. This changes the time of a step, never its result. (Blumofe and Leiserson,
"Scheduling Multithreaded Computations by Work Stealing", 1999, steal from the far end too.)
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from evenstep.profiling.clock import ShardTime

_NEWEST_WEIGHT = 0.3  # of the newest duration in a lane's moving average
_IDLE_DECAY = 0.995  # shrinks the pace of a lane that was given nothing, so that it is tried again
_STUCK_AFTER = 20  # times the usual duration
_SHORT_STEP_S = 0.002  # longer steps are always shared by all lanes
_TRY_EVERY = 256  # steps between two tries of the choice that was slower
_TRY_STEPS = 8  # steps of one try


def contiguous_runs(items: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Divide `items` into contiguous runs, one for each speed and in proportion to it.

    Lengths are rounded by largest remainders (Hamilton's apportionment; of equal remainders the
    first counts as larger): with equal speeds they differ by at most one, the longer runs first.
    Speeds are relative, at least 0 and not all 0.
    """
    if len(speeds) == 1:
        return [[*items]]
    total = sum(speeds)
    shares = [len(items) * speed / total for speed in speeds]
    lengths = [*map(int, shares)]
    by_remainder = sorted(
        range(len(speeds)), key=lambda device: (lengths[device] - shares[device], device)
    )
    for device in by_remainder[: len(items) - sum(lengths)]:
        lengths[device] += 1
    ends = list(itertools.accumulate(lengths))
    return [list(items[end - n : end]) for n, end in zip(lengths, ends, strict=True)]


@functools.lru_cache(maxsize=64)
def dealt_pairs(items: range, lengths: tuple[int, ...]) -> list[list[int]]:
    """Divide `items` among lanes pair by pair, as many to each as `lengths` says.

    So lanes that share a memory work on neighbouring nodes of the tree, whose sums don't wait long
    for each other. D lanes of one speed then hold D + log2(V / 2D) sets of gradients for V shards,
    D log2(V / D) with contiguous runs. No order needs fewer: when the last D shards are in
    progress, each has a set, at best the sum to its left, and above these D nodes of two shards,
    log2(V / 2D) sums wait.
    """
    runs: list[list[int]] = [[] for _ in lengths]
    place = 0
    while place < len(items):
        unfilled = [lane for lane, length in enumerate(lengths) if len(runs[lane]) < length]
        lane = min(unfilled, key=lambda lane: len(runs[lane]) / lengths[lane])
        count = min(2 - items[place] % 2, lengths[lane] - len(runs[lane]))
        runs[lane] += items[place : place + count]
        place += count
    return runs


def _first_pair(items: Sequence[int]) -> Sequence[int]:
    """Return the first item, and the second one if both are children of one node of the tree."""
    return items[: 2 if len(items) > 1 and items[0] // 2 == items[1] // 2 else 1]


PERIOD_STEPS = 64
"""The least number of steps between two assignments of shards to processes."""

MOST_AHEAD = 24
"""How many batches ahead of the steps a process may ask for its part of a batch."""


class ProcessAssignment:
    """Assigns each process a contiguous run of shards, in proportion to its measured speed.

    Speeds that are reported in the middle of a period take effect at the start of the next. So
    batches that were loaded ahead have the right shards, and all processes use the same runs for a
    step, even if one is some steps ahead. Until speeds are measured, those given are used.

    Args:
        speeds: of the processes, relative to each other.
        in_flight: how many steps may be unfinished at once, in any of the processes.

    Attributes:
        period: the steps between two assignments. When a process asks for the first one's part of
            a batch, every process has finished the step in the middle of the period before.
    """

    def __init__(self, speeds: Sequence[float], in_flight: int = 1) -> None:
        self.period = max(PERIOD_STEPS, 2 * (MOST_AHEAD + in_flight + 1))
        self._speeds = {-1: tuple(speeds)}  # by the period in which they were reported

    def runs(self, filled: int, step: int) -> tuple[range, ...]:
        """Return the shards of each process in step `step`, of which `filled` have examples."""
        period = max(period for period in self._speeds if period < step // self.period)
        return _runs_of(filled, self._speeds[period])

    def record_speeds(self, step: int, speeds: Sequence[float]) -> None:
        """Record the speeds that the processes reported in a step; an unknown speed is 0."""
        period, into = divmod(step, self.period)
        if into == self.period // 2 and all(speeds):
            self._speeds[period] = tuple(speeds)
            for old in sorted(self._speeds)[:-3]:
                del self._speeds[old]


@functools.lru_cache(maxsize=64)
def _runs_of(filled: int, speeds: tuple[float, ...]) -> tuple[range, ...]:
    runs = contiguous_runs(range(filled), speeds)
    ends = itertools.accumulate(len(run) for run in runs)
    return tuple(range(end - len(run), end) for run, end in zip(runs, ends, strict=True))


class Pace:
    """The seconds that each lane needs for a shard: moving averages.

    Attributes:
        seconds: for each lane its average; None before its first shard.
    """

    def __init__(self, lanes: int) -> None:
        self.seconds: list[float | None] = [None] * lanes

    def learn(self, lane: int, took_s: float) -> None:
        """Add a measured duration to a lane's average."""
        before = self.seconds[lane]
        new = took_s if before is None else before + _NEWEST_WEIGHT * (took_s - before)
        self.seconds[lane] = new

    def slowest(self) -> float:
        """Return the seconds of the slowest lane; 0 before anything was measured."""
        return max((took or 0.0 for took in self.seconds), default=0.0)

    def limit_s(self, after_s: float) -> float:
        """Return the seconds after which a lane that is still at a shard is stuck.

        They are more than `after_s`, and more than twenty times what the slowest lane usually
        takes. Before anything was measured, no lane is stuck.
        """
        usual_s = self.slowest()
        return max(after_s, _STUCK_AFTER * usual_s) if usual_s else math.inf

    def speeds(self, lost: Collection[int] = ()) -> list[float]:
        """Return the lanes' speeds relative to each other.

        A lane without a measurement counts as fast as the fastest one, a lost lane has speed 0.
        """
        known = [took for lane, took in enumerate(self.seconds) if took and lane not in lost]
        best = min(known, default=1.0)
        return [
            0.0 if lane in lost else 1 / (took or best) for lane, took in enumerate(self.seconds)
        ]

    def total_speed(self, lost: Collection[int] = ()) -> float:
        """Return the shards a second of all lanes together; 0 while a lane has no measurement."""
        alive = [took for lane, took in enumerate(self.seconds) if lane not in lost]
        return sum(1 / took for took in alive if took) if all(alive) else 0.0

    def decay(self, lanes: Iterable[int]) -> None:
        """Shrink the averages of lanes that were given nothing, so that they are tried again."""
        for lane in lanes:
            took = self.seconds[lane]
            self.seconds[lane] = took and took * _IDLE_DECAY


class OneLaneChoice:
    """Decides whether all lanes compute a step, or the fastest one alone.

    Where a shard takes microseconds, waking a second thread costs more than it saves. Both choices
    are tried in turn while steps are short; the better median is kept.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._took_s = {alone: deque[float](maxlen=_TRY_STEPS) for alone in (False, True)}

    def is_better(self) -> bool:
        """Return whether the next step is for one lane alone."""
        self._steps += 1
        together, alone = (self._usual_s(choice) for choice in (False, True))
        if not together < _SHORT_STEP_S:
            return False
        is_trying = self._steps > _TRY_EVERY and self._steps % _TRY_EVERY < _TRY_STEPS
        return (alone < together) != is_trying

    def learn(self, alone: bool, took_s: float) -> None:
        """Add the measured duration of a step."""
        self._took_s[alone].append(took_s)

    def _usual_s(self, alone: bool) -> float:
        took_s = self._took_s[alone]
        return statistics.median(took_s) if took_s else float("inf")


class ShardQueue:
    """The shards of one attempt at a step: not begun, being computed, done. Thread-safe.

    Args:
        runs: for each lane the shards that it starts with, in order.
        pace: the lanes' speeds; the queue adds what it measures.
        done: receives the time of every shard that is done.
        own_first: lanes that must compute the first shard of their runs themselves.
        may_steal: whether a lane whose run is empty takes shards from another.
        in_turn: whether lanes begin with their first pair of shards only, and take the next pair
            that is left whenever they have none.
        clock: returns the time in seconds.

    Attributes:
        dropped: whether no further shard may begin.
    """

    def __init__(
        self,
        runs: Sequence[Iterable[int]],
        pace: Pace,
        done: list[ShardTime],
        own_first: Collection[int] = (),
        clock: Callable[[], float] = time.perf_counter,
        *,
        may_steal: bool = True,
        in_turn: bool = False,
    ) -> None:
        self.dropped = False
        self._clock = clock
        self._done = done
        begun = [_first_pair([*run]) if in_turn else [*run] for run in runs]
        self._runs = [*map(deque, begun)]
        self._rest = sorted({*itertools.chain(*runs)}.difference(*begun)) if in_turn else []
        # In turn: the lanes that have shards, and are not at their end.
        self._begun = {lane for lane, run in enumerate(begun) if run} if in_turn else set[int]()
        self._pace = pace
        self._own_first = set(own_first)
        self._may_steal = may_steal
        self._current: list[tuple[int, bool, float] | None] = [None] * len(self._runs)
        self._at_once = [1] * len(self._runs)  # the shards from `_current` on that are computed
        self._lock = threading.Lock()

    def next(self, lane: int) -> int | None:
        """End the lane's current shard, if there is one, and return its next; None for no more."""
        now = self._clock()
        with self._lock:
            current = self._current[lane]
            if current is not None:
                self._current[lane] = None
                if self._at_once[lane] > 1:
                    self._end_of_several(lane, *current, now)
                else:
                    self._pace.learn(lane, now - current[2])
                    self._done.append(ShardTime(lane, *current, now))
            if self.dropped:
                return None
            run = self._runs[lane]
            if self._rest and not run and not self._is_too_slow(lane, now):
                run.extend(_first_pair(self._rest))
                del self._rest[: len(run)]
            stolen = not run
            if run:
                self._own_first.discard(lane)
                shard: int | None = run.popleft()
            else:
                shard = self._steal(lane, now) if self._may_steal else None
            if shard is None:
                self._begun.discard(lane)
            else:
                self._current[lane] = (shard, stolen, now)
            return shard

    def also(self, lane: int, shards: range) -> bool:
        """Let a lane compute all of `shards` at once, of which `next` has returned the first.

        Returns:
            Whether it may: the others are the next ones of its run.
        """
        others = shards[1:]
        with self._lock:
            run = self._runs[lane]
            if self.dropped or [*itertools.islice(run, len(others))] != [*others]:
                return False
            for _ in others:
                run.popleft()
            current = self._current[lane]
            assert current is not None
            self._at_once[lane] = len(shards)
            return True

    def stuck(self, alive: Collection[int], after_s: float) -> list[int]:
        """Return the lanes that take too long for a shard while another lane has none."""
        with self._lock:
            now, limit_s = self._clock(), self._pace.limit_s(after_s)
            at_work = [lane for lane in alive if self._current[lane] is not None]
            if len(at_work) == len(alive):
                return []
            return [lane for lane in at_work if self._working_s(lane, now) > limit_s]

    def _end_of_several(
        self, lane: int, first: int, stolen: bool, began_s: float, now: float
    ) -> None:
        """Note the times of the shards that a lane has computed at once: each an equal part."""
        count, self._at_once[lane] = self._at_once[lane], 1
        took_s = (now - began_s) / count
        self._pace.learn(lane, took_s)
        for number in range(count):
            own_s = began_s + number * took_s
            ended_s = now if number == count - 1 else own_s + took_s
            self._done.append(ShardTime(lane, first + number, stolen, own_s, ended_s))

    def _is_too_slow(self, lane: int, now: float) -> bool:
        """Whether another lane alone would have done all that is left before this one has a shard.

        The fastest of those that have not ended is never too slow, so nothing stays undone.
        """
        pace, left = self._pace.seconds, len(self._rest)
        own = pace[lane]
        others = self._begun - {lane}
        return own is not None and any(
            own > self._left_s(other, now) + (pace[other] or 0.0) * left for other in others
        )

    def _steal(self, thief: int, now: float) -> int | None:
        """Take the last shard of the run that will end last, if the thief would be done before."""
        victim, longest_s = -1, -1.0
        for lane, run in enumerate(self._runs):
            available = len(run) - (lane in self._own_first)
            if available > 0 and (left_s := self._left_s(lane, now)) > longest_s:
                victim, longest_s = lane, left_s
        pace = self._pace.seconds[thief]
        if victim < 0 or (pace is not None and pace >= longest_s):
            return None
        return self._runs[victim].pop()

    def _left_s(self, lane: int, now: float) -> float:
        """Estimate the seconds until a lane has computed its current shard and its run."""
        pace = self._pace.seconds[lane]
        if pace is None:
            return float("inf")
        # A shard that is late by some seconds is expected to take as long again.
        current_s = abs(pace - self._working_s(lane, now)) if self._current[lane] else 0.0
        return current_s + pace * len(self._runs[lane])

    def _working_s(self, lane: int, now: float) -> float:
        """Return the seconds that a lane has been at a shard."""
        current = self._current[lane]
        return (now - current[2]) / self._at_once[lane] if current is not None else 0.0
