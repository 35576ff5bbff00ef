"""Runs of items that lanes own and steal from each other; no threads, no clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.engine import Pace, Runs


def paced(*seconds, kind="shard"):
    pace = Pace(len(seconds))
    for lane, took_s in enumerate(seconds):
        if took_s is not None:
            pace.learn(lane, kind, took_s)
    return pace


def assigned(pace, *runs):
    made = Runs(len(runs), pace, lambda item: "shard")
    for lane, items in enumerate(runs):
        for item in items:
            made.add(lane, item)
    return made


def test_a_lane_works_its_run_off_from_the_front():
    runs = assigned(paced(1.0, 1.0), "abc", "d")
    assert [runs.first(0), runs.take(0), runs.take(0), runs.take(0)] == ["a", "a", "b", "c"]
    assert runs.first(0) is None
    assert runs  # d is left
    assert runs.take(1) == "d"
    assert not runs


def test_a_thief_takes_the_last_item_of_the_run_that_will_end_last():
    runs = assigned(paced(1.0, 1.0, 5.0), "", "abcd", "ef")
    assert runs.steal(0, now=0.0) == "f"  # 4 s in lane 1, 10 s in lane 2
    assert runs.steal(0, now=0.0) == "e"  # 5 s
    assert runs.steal(0, now=0.0) == "d"


def test_nothing_is_stolen_where_the_thief_would_be_done_later():
    runs = assigned(paced(5.0, 1.0), "", "abcd")
    runs.begin(1, "x", now=0.0)
    assert runs.steal(0, now=0.5) is None  # the run is done in 4.5 s
    assert runs.steal(0, now=0.0) is None  # in 5 s, no later than the thief
    assert runs.steal(0, now=3.5) == "d"  # x is 2.5 s late, and may take as long again


def test_what_was_never_measured_is_worth_a_try():
    assert assigned(paced(None, None), "", "ab").steal(0, now=0.0) == "b"
    assert assigned(paced(None, 0.1), "", "ab").steal(0, now=0.0) == "b"
    assert assigned(paced(9.0, None), "", "ab").steal(0, now=0.0) == "b"


def test_a_lane_begins_its_run_itself_where_it_shall():
    runs = assigned(paced(1.0, 1.0), "ab", "")
    runs.leave_first(0)
    assert runs.steal(1, now=0.0) == "b"
    assert runs.steal(1, now=0.0) is None
    assert runs.take(0) == "a"


def test_nothing_to_steal():
    assert assigned(paced(1.0, 1.0), "", "").steal(0, now=0.0) is None


def test_a_lane_is_stuck_when_it_is_far_beyond_the_slowest_and_another_one_waits():
    runs = assigned(paced(1.0, 2.0), "", "")
    runs.begin(0, "a", now=0.0)
    runs.begin(1, "b", now=0.0)
    assert runs.stuck({0, 1}, 5.0, now=1000.0) == []  # no lane is idle
    runs.drop(1)
    assert runs.stuck({0, 1}, 5.0, now=20.0) == []  # the slowest takes longer now and then
    assert runs.stuck({0, 1}, 5.0, now=41.0) == [0]
    assert runs.stuck({0, 1}, 60.0, now=41.0) == []
    assert runs.stuck({0}, 5.0, now=41.0) == []  # alone


def test_before_anything_was_measured_nothing_is_stuck():
    runs = assigned(paced(None, None), "", "")
    runs.begin(0, "a", now=0.0)
    assert runs.stuck({0, 1}, 0.0, now=1e6) == []


def test_paces_are_moving_averages_of_one_kind():
    pace = paced(1.0)
    pace.learn(0, "shard", 2.0)
    assert pace.of(0, "shard") == 1.3
    assert pace.of(0, "other") is None
    assert pace.slowest("shard") == 1.3
    assert pace.slowest("other") == 0.0


def test_speeds_are_relative_and_of_one_kind():
    pace = paced(0.5, 2.0, None)
    assert pace.speeds("shard") == [2.0, 0.5, 2.0]  # not measured: as the fastest
    assert pace.speeds("other") == [1.0, 1.0, 1.0]


def test_a_lost_lane_has_no_speed_and_does_not_count_for_others():
    assert paced(1.0, 2.0, None).speeds("shard", {0}) == [0.0, 0.5, 0.5]


def test_a_slow_lane_that_is_assigned_nothing_becomes_faster():
    pace = paced(1.0, 10.0, None)
    pace.forget_idle("other", [0, 1])  # nothing to forget
    for _ in range(1000):
        pace.forget_idle("shard", [1, 2])
    fast, slow, unknown = pace.speeds("shard")
    assert fast == 1.0
    assert unknown == slow > 1.0


def test_all_lanes_together_have_a_speed_once_each_was_measured():
    assert paced(0.5, None).total_speed("shard") == 0
    assert paced(0.5, 0.25).total_speed("shard") == 6
    assert paced(0.5, None).total_speed("shard", lost={1}) == 2


def test_an_item_that_was_dropped_says_nothing_about_pace():
    pace = paced(1.0)
    runs = assigned(pace, "a")
    runs.begin(0, runs.take(0), now=0.0)
    runs.drop(0)
    runs.end(0, now=9.0)
    assert pace.of(0, "shard") == 1.0


@given(
    runs=st.lists(st.lists(st.integers(), max_size=9), min_size=1, max_size=5),
    seconds=st.lists(st.none() | st.floats(1e-3, 1e3), min_size=5, max_size=5),
    data=st.data(),
)
def test_every_item_is_taken_exactly_once_and_in_the_end_somebody_takes_it(runs, seconds, data):
    """Lanes in any order, each taking its own or stealing, go through all that was assigned."""
    items = [(lane, place) for lane, run in enumerate(runs) for place in range(len(run))]
    made = assigned(
        paced(*seconds[: len(runs)]),
        *([item for item in items if item[0] == lane] for lane in range(len(runs))),
    )
    taken, now = [], 0.0
    while made:
        now += data.draw(st.floats(0, 10))
        lane = data.draw(st.integers(0, len(runs) - 1))
        item = made.take(lane) if made.first(lane) is not None else made.steal(lane, now)
        if item is not None:
            taken.append(item)
            made.begin(lane, item, now)
            made.end(lane, now + data.draw(st.floats(1e-3, 5)))
        else:  # it waits for a faster one, which has a run of its own
            assert any(made.first(other) is not None for other in range(len(runs)) if other != lane)
            other = next(o for o in range(len(runs)) if made.first(o) is not None)
            taken.append(made.take(other))
    assert sorted(taken) == items


@pytest.mark.parametrize("speeds", [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0)])
def test_two_lanes_of_different_speed_end_within_one_item_of_each_other(speeds):
    """Simulated: 8 items, assigned evenly; stealing makes up for the speeds."""
    pace = paced(*speeds)
    runs = assigned(pace, "abcd", "efgh")
    free_at, done_at, counts = [0.0, 0.0], [0.0, 0.0], [0, 0]
    while any(at < 1e9 for at in free_at):
        lane = free_at.index(min(free_at))
        now = free_at[lane]
        runs.end(lane, now)
        item = runs.take(lane) if runs.first(lane) else runs.steal(lane, now)
        if item is None:
            free_at[lane] = 1e9
            continue
        runs.begin(lane, item, now)
        free_at[lane] = done_at[lane] = now + speeds[lane]
        counts[lane] += 1
    ideal = 8 / sum(1 / speed for speed in speeds)
    assert max(done_at) <= ideal * 1.01 + 1e-9
    assert sum(counts) == 8
