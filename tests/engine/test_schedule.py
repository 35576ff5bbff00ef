"""Which lane runs what and when: events in, decisions out, without threads or a clock."""

import pytest

from evenstep.engine.graph import Place
from evenstep.engine.schedule import Job, Scheduler


class Named(Job):
    """A job that can be told from others."""

    def __init__(self, name, **where):
        super().__init__(**where)
        self.name = name


class Lanes:
    """A scheduler, told things by name; keeps its time."""

    def __init__(self, compute, **options):
        self.scheduler = Scheduler(compute, **options)
        self.jobs = {}
        self.now = 0.0

    def job(self, name, **where):
        self.jobs[name] = Named(name, **where)
        return self.jobs[name], (), (), ()

    def submit(self, *jobs):
        return told(self.scheduler.submit(jobs, self.now))

    def bound(self, lane, names):
        return self.submit(*[self.job(name, lane=lane) for name in names])

    def anywhere(self, names):
        return self.submit(*[self.job(name) for name in names])

    def runs(self, *runs, kind="work"):
        """Submit together a run of jobs for each lane."""
        return self.submit(
            *[
                self.job(name, run=lane, kind=kind)
                for lane, names in enumerate(runs)
                for name in names
            ]
        )

    def end(self, lane, *, after_s=0.0, failed=False):
        self.now += after_s
        job, _ = self.scheduler.running[lane]
        starts, ends = told(self.scheduler.ended(lane, job, self.now, failed=failed))
        assert ends[0] == job.name
        return starts

    def tick(self, *, after_s):
        self.now += after_s
        return told(self.scheduler.tick(self.now))

    def lose(self, lane):
        return told(self.scheduler.lose(lane, self.now))

    def measure(self, *paces, kind="work"):
        """Let each lane do a job of a run, for so many seconds."""
        self.runs(*[[f"measured {lane}"] for lane in range(len(paces))], kind=kind)
        began = self.now
        for lane in sorted(range(len(paces)), key=paces.__getitem__):
            self.end(lane, after_s=began + paces[lane] - self.now)


def told(decisions):
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


def test_jobs_for_anywhere_go_to_whoever_is_idle():
    lanes = Lanes(2)
    assert lanes.anywhere("abcd") == ({0: "a", 1: "b"}, [])
    assert lanes.end(1) == {1: "c"}
    assert lanes.end(1) == {1: "d"}


def test_a_lane_takes_the_earliest_of_bound_own_and_free_jobs():
    lanes = Lanes(1)
    lanes.bound(0, "a")
    lanes.anywhere("b")
    lanes.runs("c")
    lanes.bound(0, "d")
    lanes.runs("e")
    lanes.anywhere("f")
    assert [lanes.end(0)[0] for _ in range(5)] == list("bcdef")


def test_lanes_for_bound_work_get_no_other():
    lanes = Lanes(1, bound_only=1)
    assert lanes.anywhere("ab") == ({0: "a"}, [])
    assert lanes.runs("cd") == ({}, [])
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
    starts, ends = told(lanes.scheduler.ended(0, first, 0.0, failed=True))
    assert starts == {}
    assert ends == [job.name for job in chain]
    assert all(job.cause is first for job in chain)
    assert lanes.submit((Named("late"), (chain[-1],), (), ())) == ({}, ["late"])


# ---- stealing


def test_an_idle_lane_steals_the_last_job_of_a_run():
    lanes = Lanes(2)
    assert lanes.runs("abcd") == ({0: "a", 1: "d"}, [])
    assert lanes.end(1) == {1: "c"}
    assert [lanes.jobs[name].stolen for name in "abcd"] == [False, False, True, True]


def test_a_batch_is_placed_before_anything_is_stolen():
    lanes = Lanes(2)
    assert lanes.runs("ab", "cd") == ({0: "a", 1: "c"}, [])
    assert lanes.runs("e", "") == ({}, [])


def test_bound_jobs_are_never_stolen():
    lanes = Lanes(2)
    lanes.bound(0, "ab")
    assert lanes.tick(after_s=1e6) == ({}, [])


def test_the_victim_is_the_run_that_ends_last():
    lanes = Lanes(3)
    lanes.measure(1.0, 5.0, 1.0)
    assert lanes.runs("abc", "de", "f") == ({0: "a", 1: "d", 2: "f"}, [])
    assert lanes.end(2, after_s=1.0) == {2: "e"}  # 9 s of two jobs are more than 2 s of three


def test_a_thief_that_would_be_done_later_than_the_victim_steals_nothing():
    lanes = Lanes(2)
    lanes.measure(1.0, 3.0)
    assert lanes.runs("abc", "") == ({0: "a"}, [])  # all done in 3 s, so is a stolen one


def test_a_thief_steals_if_it_would_be_done_before_the_victim():
    lanes = Lanes(2)
    lanes.measure(1.0, 3.0)
    assert lanes.runs("abcd", "") == ({0: "a", 1: "d"}, [])


def test_a_lane_that_was_never_measured_may_steal():
    lanes = Lanes(2)
    lanes.runs("x")
    lanes.end(0, after_s=1e-3)
    assert lanes.runs("ab", "") == ({0: "a", 1: "b"}, [])


def test_time_alone_makes_a_late_run_worth_stealing_from():
    lanes = Lanes(2)
    lanes.measure(1.0, 3.0)
    lanes.runs("ab", "")
    assert lanes.scheduler.can_steal
    assert lanes.tick(after_s=1.5) == ({}, [])  # half a second late: done in 1.5 s, by guess
    assert lanes.tick(after_s=1.0) == ({}, [])
    assert lanes.tick(after_s=1.0) == ({1: "b"}, [])  # 2.5 s late, and another second for b
    assert not lanes.scheduler.can_steal
    assert lanes.jobs["b"].stolen


def test_there_is_nothing_to_steal_for_lanes_of_bound_work():
    lanes = Lanes(1, bound_only=1)
    lanes.runs("abc")
    assert not lanes.scheduler.can_steal
    assert lanes.tick(after_s=1e6) == ({}, [])


# ---- pace


def test_speeds_are_relative_and_of_one_kind():
    lanes = Lanes(3)
    assert lanes.scheduler.pace.speeds("work") == [1.0, 1.0, 1.0]
    lanes.measure(0.5, 2.0)
    assert lanes.scheduler.pace.speeds("work") == [2.0, 0.5, 2.0]  # not measured: as the fastest
    assert lanes.scheduler.pace.speeds("other") == [1.0, 1.0, 1.0]


def test_a_pace_follows_what_a_lane_takes_now():
    lanes = Lanes(1)
    lanes.measure(1.0)
    lanes.measure(2.0)
    assert lanes.scheduler.pace.speeds("work") == [1 / 1.3]
    for _ in range(50):
        lanes.measure(2.0)
    assert lanes.scheduler.pace.speeds("work") == [pytest.approx(0.5)]


def test_failures_and_jobs_outside_runs_say_nothing_about_pace():
    lanes = Lanes(1)
    lanes.measure(1.0)
    lanes.runs("a")
    lanes.end(0, after_s=9.0, failed=True)
    lanes.submit(lanes.job("b", kind="work"), lanes.job("c", lane=0, kind="work"))
    lanes.end(0, after_s=9.0)
    lanes.end(0, after_s=9.0)
    assert lanes.scheduler.pace.speeds("work") == [1.0]


def test_a_slow_lane_that_gets_nothing_is_forgiven_in_time():
    lanes = Lanes(2)
    lanes.scheduler.pace.forget_idle("work", [0, 1])  # nothing to forget
    lanes.measure(1.0, 10.0)
    for _ in range(1000):
        lanes.scheduler.pace.forget_idle("work", [1])
    fast, slow = lanes.scheduler.pace.speeds("work")
    assert fast == 1.0
    assert slow > 1.0


def test_forgetting_leaves_lanes_alone_that_were_never_measured():
    lanes = Lanes(2)
    lanes.runs("x")
    lanes.end(0, after_s=2.0)
    lanes.scheduler.pace.forget_idle("work", [1])
    assert lanes.scheduler.pace.speeds("work") == [0.5, 0.5]


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


def test_the_run_of_a_lost_lane_goes_to_the_others():
    lanes = Lanes(2)
    lanes.measure(1.0, 100.0)
    lanes.runs("abc", "")
    assert lanes.lose(0) == ({1: "b"}, ["a"])
    assert lanes.end(1) == {1: "c"}
    assert lanes.runs("d", "") == ({}, [])
    assert lanes.end(1) == {1: "d"}


def test_a_lost_lane_that_answers_late_changes_nothing():
    lanes = Lanes(2)
    lanes.bound(0, "a")
    lanes.lose(0)
    assert told(lanes.scheduler.ended(0, lanes.jobs["a"], 1.0)) == ({}, [])
    assert lanes.anywhere("b") == ({1: "b"}, [])
    assert lanes.anywhere("c") == ({}, [])
    assert lanes.lose(0) == ({}, [])


def test_a_lost_lane_has_no_speed_and_does_not_count_for_others():
    lanes = Lanes(3)
    lanes.measure(1.0, 2.0)
    lanes.lose(0)
    assert lanes.scheduler.pace.speeds("work", {0}) == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("where", [{}, {"run": 0}, {"run": 1}])
def test_once_every_lane_is_lost_what_would_run_anywhere_fails(where):
    lanes = Lanes(2, bound_only=1)
    lanes.bound(0, "a")
    lanes.bound(1, "b")
    lanes.submit(lanes.job("waits", **where))
    after = Named("after", lane=2)
    lanes.submit((after, (lanes.jobs["waits"],), (), ()))
    assert lanes.lose(1) == ({}, ["b"])
    assert lanes.lose(0) == ({}, ["a", "waits", "after"])
    assert lanes.submit(lanes.job("late", **where)) == ({}, ["late"])
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
