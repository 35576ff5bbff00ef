"""The pure core as a whole: random events, and what must hold after each of them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evenstep.engine.graph import Place
from evenstep.engine.schedule import Job, Scheduler

MOST_LANES = 3
PLACES = 3

places = st.sets(st.integers(0, PLACES - 1), max_size=2)
one_job = st.tuples(
    st.none() | st.integers(0, 2 * MOST_LANES - 1),  # free, or bound to a lane
    st.sets(st.integers(1, 8), max_size=3),  # how far back the jobs are whose results it takes
    places,
    places,
)


class Record:
    """A submitted job: what was asked for it, and its state."""

    def __init__(self, job, inputs, reads, writes):
        self.job, self.inputs, self.reads, self.writes = job, inputs, reads, writes
        self.lane = None
        self.ended = False

    def conflicts_with(self, other):
        touched = other.reads | other.writes
        return bool(self.writes & touched or other.writes & (self.reads | self.writes))


class SchedulerMachine(RuleBasedStateMachine):
    """Keeps its own books, from the events and decisions alone."""

    @initialize(compute=st.integers(1, MOST_LANES))
    def begin(self, compute):
        self.compute = compute
        self.scheduler = Scheduler(compute, bound_only=compute)
        self.places = [Place() for _ in range(PLACES)]
        self.records = []
        self.by_job = {}
        self.running = {}
        self.late = []

    @rule(jobs=st.lists(one_job, min_size=1, max_size=6))
    def submit(self, jobs):
        submissions = []
        for lane, back, reads, writes in jobs:
            job = Job(None if lane is None else lane % (2 * self.compute))
            known = len(self.records)
            inputs = [self.records[known - n] for n in sorted(back) if n <= known]
            record = Record(job, inputs, reads, writes)
            self.records.append(record)
            self.by_job[job] = record
            submissions.append(
                (
                    job,
                    [source.job for source in inputs],
                    [self.places[place] for place in reads],
                    [self.places[place] for place in writes],
                )
            )
        self.note(self.scheduler.submit(submissions))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def end(self, data, failed):
        lane = data.draw(st.sampled_from(sorted(self.running)))
        job = self.running.pop(lane).job
        decisions = self.scheduler.ended(lane, job, failed=failed)
        assert decisions.ends[0] is job
        assert (job.cause is job) is failed
        self.note(decisions)

    @rule(lane=st.integers(0, 2 * MOST_LANES - 1))
    def lose(self, lane):
        lane %= 2 * self.compute
        decisions = self.scheduler.lose(lane)
        if lane in self.running:
            record = self.running.pop(lane)
            assert decisions.ends[0] is record.job
            self.late.append((lane, record.job))
        self.note(decisions)

    @precondition(lambda self: self.late)
    @rule(failed=st.booleans())
    def answer_late(self, failed):
        lane, job = self.late.pop()
        assert self.scheduler.ended(lane, job, failed=failed) == ([], [])

    def note(self, decisions):
        for job in decisions.ends:
            record = self.by_job[job]
            assert not record.ended  # exactly once
            assert job.cause is not None or record.lane is not None
            record.ended = True
        for lane, job in decisions.starts:
            record = self.by_job[job]
            assert lane not in self.scheduler.lost
            assert lane not in self.running
            assert record.lane is None
            assert job.cause is None
            self.check_place(lane, job)
            record.lane = lane
            self.running[lane] = record
        for _, job in decisions.starts:
            assert self.free(self.by_job[job])

    def check_place(self, lane, job):
        if job.lane is not None:
            assert lane == job.lane
        else:
            assert lane < self.compute

    def free(self, record):
        """Whether what it takes is there, and all that came before is done with its places."""
        before = self.records[: record.job.number]
        return all(source.ended for source in record.inputs) and not any(
            other.conflicts_with(record) for other in before if not other.ended
        )

    @invariant()
    def a_write_is_alone(self):
        at_work = list(self.running.values())
        for number, record in enumerate(at_work):
            assert not any(record.conflicts_with(other) for other in at_work[:number])

    @invariant()
    def the_books_agree(self):
        unfinished = [record for record in self.records if not record.ended]
        assert self.scheduler.graph.unfinished == len(unfinished)
        running = {lane: job for lane, job in enumerate(self.scheduler.running) if job}
        assert running == {lane: record.job for lane, record in self.running.items()}

    @invariant()
    def no_lane_is_idle_beside_work_that_only_it_or_anyone_may_do(self):
        idle = set(range(2 * self.compute)) - self.scheduler.lost - set(self.running)
        computing = {lane for lane in idle if lane < self.compute}
        for record in self.records:
            if record.lane is None and not record.ended and self.free(record):
                job = record.job
                if job.lane is not None:
                    assert job.lane not in idle | self.scheduler.lost
                else:
                    assert not computing
                    assert set(range(self.compute)) - self.scheduler.lost

    def teardown(self):
        """Let everything end: nothing is left over, and failures reached all dependent jobs."""
        if not hasattr(self, "records"):
            return
        while self.running:
            lane = min(self.running)
            self.note(self.scheduler.ended(lane, self.running.pop(lane).job))
            self.the_books_agree()
        assert all(record.ended for record in self.records)
        undefined = {}
        for record in self.records:
            job = record.job
            causes = [source.job.cause for source in record.inputs]
            causes += [undefined.get(place) for place in record.reads | record.writes]
            numbers = [cause.number for cause in causes if cause is not None]
            if numbers:
                assert job.cause.number == min(numbers)
                assert record.lane is None
            else:
                assert job.cause in (None, job)
            for place in record.writes:
                undefined[place] = job.cause
        for number, place in enumerate(self.places):
            assert place.cause is undefined.get(number)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, derandomize=True
)


@pytest.mark.slow
class TestSchedulerMachineForLonger(SchedulerMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
