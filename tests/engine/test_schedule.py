"""Which lane runs what and when: events in, decisions out, without threads or a clock."""

from evenstep.engine.graph import Place
from evenstep.engine.schedule import Job, Scheduler


class Named(Job):
    """A job with a name."""

    def __init__(self, name, **where):
        super().__init__(**where)
        self.name = name


class Lanes:
    """A scheduler whose jobs have names."""

    def __init__(self, compute, **options):
        self.scheduler = Scheduler(compute, **options)
        self.jobs = {}

    def job(self, name, **where):
        self.jobs[name] = Named(name, **where)
        return self.jobs[name], (), (), ()

    def submit(self, *jobs):
        return decided(self.scheduler.submit(jobs))

    def bound(self, lane, names):
        return self.submit(*[self.job(name, lane=lane) for name in names])

    def anywhere(self, names):
        return self.submit(*[self.job(name) for name in names])

    def end(self, lane, *, failed=False):
        job = self.scheduler.running[lane]
        starts, ends = decided(self.scheduler.ended(lane, job, failed=failed))
        assert ends[0] == job.name
        return starts

    def lose(self, lane):
        return decided(self.scheduler.lose(lane))


def decided(decisions):
    return (
        {lane: job.name for lane, job in decisions.starts},
        [job.name for job in decisions.ends],
    )


# ---- where jobs run


def test_bound_jobs_run_on_their_lane_in_their_order():
    lanes = Lanes(2)
    assert lanes.bound(1, "abc") == ({1: "a"}, [])
    assert lanes.end(1) == {1: "b"}
    assert lanes.end(1) == {1: "c"}
    assert lanes.end(1) == {}


def test_jobs_for_anywhere_go_to_an_idle_lane():
    lanes = Lanes(2)
    assert lanes.anywhere("abcd") == ({0: "a", 1: "b"}, [])
    assert lanes.end(1) == {1: "c"}
    assert lanes.end(1) == {1: "d"}


def test_a_lane_takes_the_earliest_of_bound_and_free_jobs():
    lanes = Lanes(1)
    lanes.bound(0, "a")
    lanes.anywhere("b")
    lanes.bound(0, "cd")
    lanes.anywhere("e")
    lanes.bound(0, "f")
    assert [lanes.end(0)[0] for _ in range(5)] == list("bcdef")


def test_the_lane_whose_job_has_ended_comes_first():
    lanes = Lanes(2)
    x = Place()
    writer = Named("w", lane=1)
    readers = [(Named(name), (), (x,), ()) for name in "ab"]
    lanes.submit((writer, (), (), (x,)), *readers)
    assert lanes.end(1) == {1: "a", 0: "b"}


def test_lanes_for_bound_work_get_no_other():
    lanes = Lanes(1, bound_only=1)
    assert lanes.anywhere("ab") == ({0: "a"}, [])
    assert lanes.bound(1, "e") == ({1: "e"}, [])
    assert lanes.end(1) == {}


def test_a_job_that_waits_is_queued_when_its_inputs_have_ended():
    lanes = Lanes(2)
    x = Place()
    writer, reader, other = Named("w", lane=0), Named("r", lane=1), Named("o", lane=1)
    jobs = [(writer, (), (), (x,)), (reader, (), (x,), ()), (other, (), (), ())]
    assert lanes.submit(*jobs) == ({0: "w", 1: "o"}, [])
    assert lanes.end(0) == {}
    assert lanes.end(1) == {1: "r"}


def test_poisoned_jobs_end_without_a_start_however_many():
    lanes = Lanes(2)
    first = Named("first", lane=0)
    chain = [first]
    jobs = [(first, (), (), ())]
    for number in range(5000):
        chain.append(Named(str(number), lane=1))
        jobs.append((chain[-1], (chain[-2],), (), ()))
    lanes.submit(*jobs)
    starts, ends = decided(lanes.scheduler.ended(0, first, failed=True))
    assert starts == {}
    assert ends == [job.name for job in chain]
    assert all(job.cause is first for job in chain)
    assert lanes.submit((Named("late"), (chain[-1],), (), ())) == ({}, ["late"])


# ---- lost lanes


def test_a_lost_lane_fails_what_it_runs_and_what_is_bound_to_it():
    lanes = Lanes(2)
    lanes.bound(0, "ab")
    taker = Named("taker", lane=1)
    assert lanes.submit((taker, (lanes.jobs["b"],), (), ())) == ({}, [])
    assert lanes.lose(0) == ({}, ["a", "b", "taker"])
    assert [lanes.jobs[name].cause.name for name in "ab"] == ["a", "b"]
    assert taker.cause is lanes.jobs["b"]
    assert lanes.bound(0, "c") == ({}, ["c"])
    assert lanes.bound(1, "d") == ({1: "d"}, [])


def test_a_lost_lane_that_answers_late_changes_nothing():
    lanes = Lanes(2)
    lanes.bound(0, "a")
    lanes.lose(0)
    assert decided(lanes.scheduler.ended(0, lanes.jobs["a"])) == ({}, [])
    assert lanes.anywhere("b") == ({1: "b"}, [])
    assert lanes.anywhere("c") == ({}, [])
    assert lanes.lose(0) == ({}, [])


def test_once_every_lane_is_lost_what_would_run_anywhere_fails():
    lanes = Lanes(2, bound_only=1)
    lanes.bound(0, "a")
    lanes.bound(1, "b")
    lanes.anywhere(["waits"])
    after = Named("after", lane=2)
    lanes.submit((after, (lanes.jobs["waits"],), (), ()))
    assert lanes.lose(1) == ({}, ["b"])
    assert lanes.lose(0) == ({}, ["a", "waits", "after"])
    assert lanes.anywhere(["late"]) == ({}, ["late"])
    assert lanes.jobs["late"].cause is lanes.jobs["late"]
    assert lanes.bound(2, "c") == ({2: "c"}, [])
    assert lanes.scheduler.graph.unfinished == 1


def test_a_long_chain_of_jobs_for_a_lost_lane_is_no_deep_recursion():
    """Each reads what the next one writes, so that each ends by a failure of its own."""
    lanes = Lanes(2)
    lanes.bound(1, "a")
    places = [Place() for _ in range(5001)]
    jobs = [Named(str(number), lane=1) for number in range(5000)]
    for number, job in enumerate(jobs):
        lanes.submit((job, (), (places[number + 1],), (places[number],)))
    lanes.lose(1)
    assert all(job.cause is job for job in jobs)
    assert lanes.scheduler.graph.unfinished == 0
