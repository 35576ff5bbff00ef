"""Which lane runs which task, and when: a pure machine, told events, returning decisions.

Events are `submit`, `ended`, `tick` (time has passed) and `lose`; each returns what starts now and
what has ended. No threads, no clock, no torch: the time is an argument, and tests feed events and
look at the decisions. (The style of dask.distributed's worker state machine.)

A task is bound to a lane, or belongs to the run of a lane, from whose far end idle lanes may steal
it, or may run anywhere. Stealing moves time and never results (Blumofe and Leiserson, "Scheduling
Multithreaded Computations by Work Stealing", 1999, steal at the far end too).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from evenstep.engine.graph import Graph, Node, Place

_RECENT = 0.3  # the share of the newest duration in a lane's moving average
_LATE = 20  # times its usual duration after which a job is stuck
_FORGET = 0.995  # what an idle lane's pace shrinks by for each run it got nothing of


class Job(Node):
    """A task with where it is to run.

    Attributes:
        lane: the lane it is bound to; None if any will do.
        run: the lane whose run it belongs to, from which others may steal; None if to none.
        kind: tasks of a run with the same kind take about the same time.
        stolen: whether another lane than that of its run took it.
    """

    __slots__ = ("kind", "lane", "run", "stolen")

    def __init__(self, lane: int | None = None, run: int | None = None, kind: str = "") -> None:
        super().__init__()
        self.lane = lane
        self.run = run
        self.kind = kind
        self.stolen = False


Submission: TypeAlias = "tuple[Job, Iterable[Node], Iterable[Place], Iterable[Place]]"
"""A job; the jobs whose results it takes; what it reads; what it writes."""


class Decisions(NamedTuple):
    """What follows from an event.

    Attributes:
        starts: (lane, job) for each job that starts now.
        ends: jobs that have ended; those that were never started have a `cause`.
    """

    starts: list[tuple[int, Any]]
    ends: list[Any]


class Scheduler:
    """Decides for `compute` lanes that take any work, and further ones for bound work alone.

    Attributes:
        graph: who waits for whom.
        lost: lanes that get nothing any more.
        running: for each lane the job it runs and the time it started.
    """

    def __init__(self, compute: int, bound_only: int = 0) -> None:
        lanes = compute + bound_only
        self.graph: Graph[Job] = Graph()
        self.compute = compute
        self.lost: set[int] = set()
        self.running: list[tuple[Job, float] | None] = [None] * lanes
        self._bound: list[deque[Job]] = [deque() for _ in range(lanes)]
        self._runs: list[deque[Job]] = [deque() for _ in range(compute)]
        self._anywhere: deque[Job] = deque()
        self._idle = set(range(lanes))
        self._pace: dict[str, list[float | None]] = {}

    # ---- events

    def submit(self, jobs: Iterable[Submission], now: float) -> Decisions:
        """Jobs are submitted, in this order."""
        decisions = Decisions([], [])
        for job, inputs, reads, writes in jobs:
            for ready in self.graph.add(job, inputs, reads, writes):
                if not self._queue(ready):
                    self._end(ready, decisions, failed=ready.cause is None)
        return self._fill(now, decisions)

    def ended(self, lane: int, job: Job, now: float, *, failed: bool = False) -> Decisions:
        """The job that `lane` ran has ended. Of a lane that was lost, that changes nothing."""
        decisions = Decisions([], [])
        running = self.running[lane]
        if running is None or running[0] is not job:
            return decisions
        self.running[lane] = None
        self._idle.add(lane)
        if job.run is not None and not failed:
            self._learn(lane, job.kind, now - running[1])
        self._end(job, decisions, failed=failed)
        return self._fill(now, decisions)

    def tick(self, now: float) -> Decisions:
        """Time has passed: a run that is late may now be worth stealing from."""
        return self._fill(now, Decisions([], []))

    def lose(self, lane: int, now: float) -> Decisions:
        """A lane is lost: what it runs and what is bound to it fails, its run goes to others.

        With the last computing lane everything fails that only such a lane could run.
        """
        decisions = Decisions([], [])
        self.lost.add(lane)
        self._idle.discard(lane)
        running, self.running[lane] = self.running[lane], None
        orphans = [running[0]] if running else []
        orphans += self._bound[lane]
        self._bound[lane].clear()
        if lane < self.compute:
            self._anywhere.extend(self._runs[lane])
            self._runs[lane].clear()
            if not self._has_lanes:
                orphans += self._anywhere
                self._anywhere.clear()
        for job in orphans:
            self._end(job, decisions, failed=True)
        return self._fill(now, decisions)

    # ---- questions

    @property
    def can_steal(self) -> bool:
        """Whether a lane is idle beside another one's run: then `tick` is worth calling."""
        return any(self._runs) and any(lane < self.compute for lane in self._idle)

    def speeds(self, kind: str) -> list[float]:
        """Return how fast each compute lane is with runs of `kind`, relative to each other.

        A lane that was not yet measured counts as the fastest one does; a lost one has 0.
        """
        paces = self._pace.get(kind, [None] * self.compute)
        known = [pace for lane, pace in enumerate(paces) if pace and lane not in self.lost]
        best = min(known, default=1.0)
        return [0.0 if lane in self.lost else 1 / (pace or best) for lane, pace in enumerate(paces)]

    def stuck(self, after_s: float, now: float) -> list[int]:
        """Return the lanes that have been at one job of a run too long while another is idle.

        Too long is `after_s`, and twenty times what the slowest lane takes for such a job; before
        anything was measured nothing is too long.
        """
        alive = [lane for lane in range(self.compute) if lane not in self.lost]
        running = [(lane, *at) for lane in alive if (at := self.running[lane]) is not None]
        if len(running) == len(alive):
            return []
        stuck = []
        for lane, job, began in running:
            slowest = max((pace or 0.0 for pace in self._pace.get(job.kind, ())), default=0.0)
            if job.run is not None and slowest and now - began > max(after_s, _LATE * slowest):
                stuck.append(lane)
        return stuck

    def forget_idle(self, kind: str, lanes: Iterable[int]) -> None:
        """Trust the pace of `lanes`, which got nothing of a run, a little less.

        So a lane that was slow for a while is tried again some day.
        """
        if paces := self._pace.get(kind):
            for lane in lanes:
                pace = paces[lane]
                paces[lane] = pace and pace * _FORGET

    # ---- decisions

    @property
    def _has_lanes(self) -> bool:
        """Whether there is a computing lane left."""
        return not self.lost or any(lane not in self.lost for lane in range(self.compute))

    def _queue(self, job: Job) -> bool:
        """Queue a job that waits for nothing any more; False: it must end, none may run it."""
        if job.cause is not None:
            return False
        if job.lane is not None:
            if job.lane in self.lost:
                return False
            self._bound[job.lane].append(job)
        elif job.run is not None and job.run not in self.lost:
            self._runs[job.run].append(job)
        elif self._has_lanes:
            self._anywhere.append(job)
        else:
            return False
        return True

    def _end(self, job: Job, decisions: Decisions, *, failed: bool) -> None:
        ends = [(job, failed)]
        while ends:  # not recursive: a chain of jobs that can't run may be long
            ending, failed = ends.pop()
            decisions.ends.append(ending)
            freed = self.graph.end(ending, failed=failed)
            ends += [(ready, ready.cause is None) for ready in freed if not self._queue(ready)]

    def _fill(self, now: float, decisions: Decisions) -> Decisions:
        """Give idle lanes what they should run next: first their own, then what they can steal."""
        for choose in (self._own, self._steal):
            if not self._idle:
                break
            for lane in sorted(self._idle):
                job = choose(lane, now)
                if job is not None:
                    self._idle.remove(lane)
                    self.running[lane] = (job, now)
                    decisions.starts.append((lane, job))
        return decisions

    def _own(self, lane: int, now: float) -> Job | None:
        """Take the earliest job that is bound to the lane, in its run, or free."""
        bound = self._bound[lane]
        if lane >= self.compute:
            return bound.popleft() if bound else None
        first: deque[Job] | None = bound or None
        for queue in (self._runs[lane], self._anywhere):
            if queue and (first is None or queue[0].number < first[0].number):
                first = queue
        return first.popleft() if first else None

    def _steal(self, thief: int, now: float) -> Job | None:
        """Take the last job of the run that will end last, if the thief would be done before."""
        if thief >= self.compute:
            return None
        victim = max(
            (lane for lane in range(self.compute) if self._runs[lane]),
            key=lambda lane: self._left_s(lane, now),
            default=None,
        )
        if victim is None:
            return None
        pace = self._pace_of(thief, self._runs[victim][-1].kind)
        if pace is not None and pace >= self._left_s(victim, now):
            return None
        job = self._runs[victim].pop()
        job.stolen = True
        return job

    def _left_s(self, lane: int, now: float) -> float:
        """Guess the seconds until a lane has done what it runs and its run."""
        run = self._runs[lane]
        pace = self._pace_of(lane, run[-1].kind)
        if pace is None:
            return float("inf")
        running = self.running[lane]
        # A job that is late: as late as it is, as long it may still take.
        current = abs(pace - (now - running[1])) if running else 0.0
        return current + pace * len(run)

    def _pace_of(self, lane: int, kind: str) -> float | None:
        paces = self._pace.get(kind)
        return paces[lane] if paces else None

    def _learn(self, lane: int, kind: str, took_s: float) -> None:
        paces = self._pace.setdefault(kind, [None] * self.compute)
        before = paces[lane]
        paces[lane] = took_s if before is None else before + _RECENT * (took_s - before)
