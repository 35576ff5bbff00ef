"""Decides which lane runs which task, and when: a state machine without threads, clock or torch.

`submit`, `ended` and `lose` report an event and return the decisions that follow from it: which
tasks start on which lanes, and which tasks have ended. Tests call them and look at the decisions.
(The style of dask.distributed's worker state machine.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from evenstep.engine.graph import Graph, Node, Place


class Job(Node):
    """A node of the graph with the lane it must run on.

    Attributes:
        lane: the only lane that may run it; None: any computing lane may.
    """

    __slots__ = ("lane",)

    def __init__(self, lane: int | None = None) -> None:
        super().__init__()
        self.lane = lane


Submission: TypeAlias = "tuple[Job, Iterable[Node], Sequence[Place], Sequence[Place]]"
"""A job, the jobs whose results it needs, the places it reads, and the places it writes."""


class Decisions(NamedTuple):
    """What follows from an event.

    Attributes:
        starts: a (lane, job) pair for each job that starts now.
        ends: jobs that have ended; those that never started have a `cause`.
    """

    starts: list[tuple[int, Any]]
    ends: list[Any]


class Scheduler:
    """Assigns jobs to lanes in the order of submission.

    Args:
        compute: number of computing lanes, which also run jobs that are not bound to a lane.
        bound_only: number of further lanes, which run only jobs that are bound to them.

    Attributes:
        graph: the jobs that have not ended, and which of them wait for which.
        lost: lanes that were given up; they are assigned no more jobs.
        running: the job that each lane runs; None for an idle lane.
    """

    def __init__(self, compute: int, bound_only: int = 0, first: int = 0) -> None:
        lanes = compute + bound_only
        self.graph: Graph[Job] = Graph(first)
        self.compute = compute
        self.lost: set[int] = set()
        self.running: list[Job | None] = [None] * lanes
        self._bound: list[deque[Job]] = [deque() for _ in range(lanes)]
        self._anywhere: deque[Job] = deque()
        self._idle = set(range(lanes))

    # ---- events

    def submit(self, jobs: Iterable[Submission]) -> Decisions:
        """Report that jobs were submitted, in this order."""
        decisions = Decisions([], [])
        for job, inputs, reads, writes in jobs:
            for ready in self.graph.add(job, inputs, reads, writes):
                if not self._queue(ready):
                    self._end(ready, decisions, failed=ready.cause is None)
        return self._fill(decisions)

    def ended(self, lane: int, job: Job, *, failed: bool = False) -> Decisions:
        """Report that the job that `lane` ran has ended; ignored if the lane was lost meanwhile."""
        decisions = Decisions([], [])
        if self.running[lane] is not job:
            return decisions
        self.running[lane] = None
        self._idle.add(lane)
        self._end(job, decisions, failed=failed)
        return self._fill(decisions, first=lane)

    def lose(self, lane: int) -> Decisions:
        """Report that a lane is lost: the job it runs and those bound to it fail.

        With the last computing lane, the jobs that any computing lane could run fail too.
        """
        decisions = Decisions([], [])
        self.lost.add(lane)
        self._idle.discard(lane)
        running, self.running[lane] = self.running[lane], None
        orphans = [running] if running else []
        orphans += self._bound[lane]
        self._bound[lane].clear()
        if not self._has_lanes:
            orphans += self._anywhere
            self._anywhere.clear()
        for job in orphans:
            self._end(job, decisions, failed=True)
        return self._fill(decisions)

    @property
    def stands_still(self) -> bool:
        """Whether jobs have not ended although none runs and none could: a mistake in the graph."""
        runs = any(job is not None for job in self.running)
        return bool(self.graph.unfinished) and not (runs or self._anywhere or any(self._bound))

    # ---- decisions

    @property
    def _has_lanes(self) -> bool:
        """Whether any computing lane is left."""
        return not self.lost.issuperset(range(self.compute))

    def _queue(self, job: Job) -> bool:
        """Queue a job that waits for nothing; return False if it must end because it can't run."""
        if job.cause is not None:
            return False
        if job.lane is None:
            if not self._has_lanes:
                return False
            self._anywhere.append(job)
        elif job.lane in self.lost:
            return False
        else:
            self._bound[job.lane].append(job)
        return True

    def _end(self, job: Job, decisions: Decisions, *, failed: bool) -> None:
        ends = [(job, failed)]
        while ends:  # not recursive: a chain of jobs that can't run may be long
            ending, failed = ends.pop()
            decisions.ends.append(ending)
            freed = self.graph.end(ending, failed=failed)
            ends += [(ready, ready.cause is None) for ready in freed if not self._queue(ready)]

    def _fill(self, decisions: Decisions, *, first: int = -1) -> Decisions:
        """Assign the next job to each idle lane, in the order of the lanes.

        Lane `first` comes before the others: its thread is awake and its cache is warm.
        """
        for lane in sorted(self._idle, key=lambda lane: (lane != first, lane)):
            job = self._next(lane)
            if job is not None:
                self._idle.remove(lane)
                self.running[lane] = job
                decisions.starts.append((lane, job))
        return decisions

    def _next(self, lane: int) -> Job | None:
        """Take the earliest job that is bound to the lane or, on a computing lane, to none."""
        queue, free = self._bound[lane], self._anywhere
        if lane < self.compute and free and (not queue or free[0].number < queue[0].number):
            queue = free
        return queue.popleft() if queue else None
