"""Which lane runs which task, and when: a pure machine, told events, returning decisions.

Events are `submit`, `ended`, `tick` (time has passed) and `lose`; each returns what starts now and
what has ended. No threads, no clock, no torch: the time is an argument, and tests feed events and
look at the decisions. (The style of dask.distributed's worker state machine.)

A task is bound to a lane, or belongs to the run of a lane, from whose far end idle lanes may steal
it, or may run anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from evenstep.engine.graph import Graph, Node, Place
from evenstep.engine.stealing import Pace, Runs


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


Submission: TypeAlias = "tuple[Job, Iterable[Node], Sequence[Place], Sequence[Place]]"
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
        pace: how fast lanes are with tasks of runs.
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
        self.pace = Pace(compute)
        self._runs: Runs[Job] = Runs(compute, self.pace, _kind_of)
        self._anywhere: deque[Job] = deque()
        self._idle = set(range(lanes))

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
        if lane < self.compute:
            if job.run is not None and not failed:
                self._runs.end(lane, now)
            else:
                self._runs.drop(lane)
        self._end(job, decisions, failed=failed)
        return self._fill(now, decisions, first=lane)

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
            self._runs.drop(lane)
            self._anywhere.extend(self._runs.take_all(lane))
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
        return bool(self._runs) and any(lane < self.compute for lane in self._idle)

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
            self._runs.add(job.run, job)
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

    def _fill(self, now: float, decisions: Decisions, *, first: int = -1) -> Decisions:
        """Give idle lanes what they should run next: first their own, then what they can steal.

        Lane `first` comes first: its thread is awake, and its cache warm.
        """
        for choose in (self._own, self._steal):
            if not self._idle or (choose == self._steal and not self._runs):
                break
            lanes = sorted(self._idle)
            if first in self._idle and first != lanes[0]:
                lanes.remove(first)
                lanes.insert(0, first)
            for lane in lanes:
                job = choose(lane, now)
                if job is not None:
                    self._idle.remove(lane)
                    self.running[lane] = (job, now)
                    if lane < self.compute:
                        self._runs.begin(lane, job, now)
                    decisions.starts.append((lane, job))
        return decisions

    def _own(self, lane: int, now: float) -> Job | None:
        """Take the earliest job that is bound to the lane, in its run, or free."""
        bound = self._bound[lane]
        if lane >= self.compute:
            return bound.popleft() if bound else None
        own = self._runs.first(lane)
        queue = bound
        if self._anywhere and (not bound or self._anywhere[0].number < bound[0].number):
            queue = self._anywhere
        if own is not None and (not queue or own.number < queue[0].number):
            return self._runs.take(lane)
        return queue.popleft() if queue else None

    def _steal(self, thief: int, now: float) -> Job | None:
        if thief >= self.compute:
            return None
        job = self._runs.steal(thief, now)
        if job is not None:
            job.stolen = True
        return job


def _kind_of(job: Job) -> str:
    return job.kind
