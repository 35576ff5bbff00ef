"""Which shard a lane computes next: no threads, a clock of the test's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.batch.assignment import Pace, ShardQueue, dealt_pairs
from evenstep.profiling.clock import ShardTime


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def paced(*seconds):
    pace = Pace(len(seconds))
    for lane, took_s in enumerate(seconds):
        if took_s is not None:
            pace.learn(lane, took_s)
    return pace


def queue_of(pace, *runs, own_first=()):
    """Return a queue, its clock, and the list that receives the times of its shards."""
    clock, done = Clock(), []
    return ShardQueue(runs, pace, done, own_first, clock), clock, done


def test_a_lane_computes_its_run_from_the_front():
    queue, _, done = queue_of(paced(1.0, 1.0), [0, 1, 2], [3])
    assert [queue.next(0) for _ in range(3)] == [0, 1, 2]
    assert queue.next(1) == 3
    assert [(time.lane, time.shard, time.stolen) for time in done] == [(0, 0, False), (0, 1, False)]


def test_shards_that_are_computed_at_once_each_take_a_part_of_the_time():
    queue, clock, done = queue_of(paced(1.0), [0, 1, 2, 3, 4])
    assert queue.next(0) == 0
    assert queue.also(0, range(3))
    clock.now = 6.0
    assert queue.next(0) == 3
    assert [(one.shard, one.began_s, one.ended_s) for one in done] == [
        *((0, 0.0, 2.0), (1, 2.0, 4.0), (2, 4.0, 6.0))
    ]


def test_only_the_next_shards_of_the_own_run_are_computed_at_once():
    queue, *_ = queue_of(paced(1.0, 9.0), [0, 1], [2, 3])
    assert queue.next(0) == 0
    assert not queue.also(0, range(3))  # 2 is another lane's
    assert queue.also(0, range(2))
    assert queue.next(0) == 3  # stolen
    assert not queue.also(0, range(3, 5))
    queue.dropped = True
    assert not queue.also(1, range(2, 3))


def test_a_lane_that_computes_several_shards_may_take_as_much_longer():
    queue, clock, _ = queue_of(paced(1.0, 1.0), [0, 1, 2, 3], [])
    assert queue.next(0) == 0
    assert queue.also(0, range(4))
    clock.now = 60.0  # 15 s for each
    assert queue.stuck([0, 1], 16.0) == []
    clock.now = 90.0
    assert queue.stuck([0, 1], 16.0) == [0]


def test_a_thief_takes_the_last_shard_of_the_run_that_will_end_last():
    queue, *_ = queue_of(paced(1.0, 1.0, 5.0), [], [0, 1, 2, 3], [4, 5])
    assert queue.next(0) == 5  # 4 s in lane 1, 10 s in lane 2
    assert queue.next(0) == 4  # 5 s in lane 2
    assert queue.next(0) == 3


def test_nothing_is_stolen_where_the_thief_would_be_done_later():
    queue, clock, _ = queue_of(paced(5.0, 1.0), [], [9, 0, 1, 2, 3])
    assert queue.next(1) == 9
    clock.now = 0.5
    assert queue.next(0) is None  # the run is done in 4.5 s
    clock.now = 0.0
    assert queue.next(0) is None  # in 5 s, no later than the thief
    clock.now = 3.5
    assert queue.next(0) == 3  # shard 9 is 2.5 s late, and may take as long again


def test_nothing_is_stolen_where_it_may_not_be():
    queue = ShardQueue([[], [0, 1, 2]], paced(1.0, 1.0), [], may_steal=False)
    assert [queue.next(0), queue.next(1), queue.next(0)] == [None, 0, None]


@pytest.mark.parametrize("seconds", [(None, None), (None, 0.1), (9.0, None)])
def test_a_lane_without_a_measurement_is_tried(seconds):
    queue, *_ = queue_of(paced(*seconds), [], [0, 1])
    assert queue.next(0) == 1


def test_a_lane_can_be_made_to_compute_its_first_shard_itself():
    queue, *_ = queue_of(paced(1.0, 1.0), [0, 1], [], own_first=[0])
    assert queue.next(1) == 1
    assert queue.next(1) is None
    assert queue.next(0) == 0


def test_a_stolen_shard_says_so_with_its_times():
    queue, clock, done = queue_of(paced(1.0, 1.0), [], [0, 1])
    clock.now = 2.0
    assert queue.next(0) == 1
    clock.now = 5.0
    queue.next(0)
    assert done == [ShardTime(lane=0, shard=1, stolen=True, began_s=2.0, ended_s=5.0)]


def test_after_a_drop_no_shard_begins_and_those_in_progress_end():
    queue, _, done = queue_of(paced(1.0, 1.0), [0, 1], [2, 3])
    assert queue.next(0) == 0
    queue.dropped = True
    assert queue.next(0) is None
    assert queue.next(1) is None
    assert [time.shard for time in done] == [0]


def test_a_lane_is_stuck_when_it_is_far_beyond_the_slowest_and_another_one_waits():
    queue, clock, _ = queue_of(paced(1.0, 2.0), [0], [1])
    queue.next(0)
    queue.next(1)
    clock.now = 1000.0
    assert queue.stuck({0, 1}, 5.0) == []  # no lane waits
    clock.now = 1.0
    queue.next(1)
    clock.now = 20.0
    assert queue.stuck({0, 1}, 5.0) == []  # the slowest takes longer now and then
    clock.now = 41.0
    assert queue.stuck({0, 1}, 5.0) == [0]
    assert queue.stuck({0, 1}, 60.0) == []
    assert queue.stuck({0}, 5.0) == []  # alone


def test_before_anything_was_measured_no_lane_is_stuck():
    queue, clock, _ = queue_of(paced(None, None), [0], [])
    queue.next(0)
    clock.now = 1e6
    assert queue.stuck({0, 1}, 0.0) == []


def test_paces_are_moving_averages():
    pace = paced(1.0, None)
    pace.learn(0, 2.0)
    assert pace.seconds == [1.3, None]
    assert pace.slowest() == 1.3
    assert pace.total_speed() == 0.0  # lane 1 is not known
    assert pace.total_speed(lost=[1]) == 1 / 1.3


def test_speeds_of_unknown_and_lost_lanes():
    assert paced(2.0, None, 4.0, 1.0).speeds(lost=[3]) == [0.5, 0.5, 0.25, 0.0]


def test_a_lane_without_shards_is_tried_again_some_day():
    pace = paced(1.0, 10.0)
    for _ in range(1000):
        pace.decay([1])
    assert pace.seconds[0] == 1.0
    assert pace.seconds[1] < 1.0


@given(
    runs=st.lists(st.lists(st.integers(), max_size=9), min_size=1, max_size=5),
    seconds=st.lists(st.none() | st.floats(1e-3, 1e3), min_size=5, max_size=5),
    data=st.data(),
)
def test_every_shard_is_computed_exactly_once(runs, seconds, data):
    """Lanes ask in any order; a lane that gets nothing is not the last one with work."""
    sizes = [len(run) for run in runs]
    starts = [sum(sizes[:lane]) for lane in range(len(sizes))]
    owned = [list(range(start, start + n)) for start, n in zip(starts, sizes, strict=True)]
    queue, clock, done = queue_of(paced(*seconds[: len(runs)]), *owned)
    asked = set(range(len(runs)))
    while asked:
        clock.now += data.draw(st.floats(0, 10))
        lane = data.draw(st.sampled_from(sorted(asked)))
        if queue.next(lane) is None:
            asked.discard(lane)
    assert sorted(time.shard for time in done) == list(range(sum(sizes)))


@pytest.mark.parametrize("speeds", [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0)])
def test_two_lanes_of_different_speed_end_within_one_shard_of_each_other(speeds):
    """Simulated: 8 shards, assigned evenly; stealing makes up for the speeds."""
    queue, clock, _ = queue_of(paced(*speeds), [0, 1, 2, 3], [4, 5, 6, 7])
    free_at, done_at = {0: 0.0, 1: 0.0}, [0.0, 0.0]
    while free_at:
        lane = min(free_at, key=free_at.__getitem__)
        clock.now = free_at[lane]
        if queue.next(lane) is None:
            del free_at[lane]
        else:
            free_at[lane] = done_at[lane] = clock.now + speeds[lane]
    ideal = 8 / sum(1 / speed for speed in speeds)
    assert max(done_at) <= ideal * 1.01 + 1e-9


def test_a_lane_that_is_too_slow_takes_none_of_the_pairs_that_are_left():
    pace = paced(1.0, 100.0)
    queue = ShardQueue([[*range(8)], []], pace, [], clock=Clock(), in_turn=True)
    assert queue.next(0) == 0
    assert queue.next(1) is None
    assert [queue.next(0) for _ in range(8)] == [1, 2, 3, 4, 5, 6, 7, None]


seconds = st.sampled_from([1.0, 2.0, 3.0]) | st.floats(0.01, 100.0)


@given(
    st.lists(st.tuples(st.none() | seconds, st.lists(seconds, min_size=1)), min_size=2, max_size=4),
    st.data(),
)
def test_every_shard_that_is_taken_in_turn_is_computed_once(lanes, data):
    """Whatever was measured before, and however long each shard takes now."""
    lengths = data.draw(st.tuples(*(st.integers(0, 6) for _ in lanes)).filter(any))
    clock, taken = Clock(), []
    pace = paced(*(before for before, _ in lanes))
    runs = dealt_pairs(range(sum(lengths)), lengths)
    queue = ShardQueue(runs, pace, [], clock=clock, in_turn=True)
    free_s = dict.fromkeys(range(len(lanes)), 0.0)
    while free_s:
        lane = min(free_s, key=free_s.__getitem__)
        clock.now = free_s[lane]
        shard = queue.next(lane)
        if shard is None:
            del free_s[lane]
        else:
            durations = lanes[lane][1]
            free_s[lane] += durations[len(taken) % len(durations)]
            taken.append(shard)
    assert sorted(taken) == [*range(sum(lengths))]
