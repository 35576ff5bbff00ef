"""What the benchmark of stages reads out of a step's visits."""

import pytest

import benchmarking  # noqa: F401 - puts benchmarks/ on the path
from specs import stages

VISITS = [  # shard, stage, backward, began_s, ended_s: two shards, a backward pass of two seconds
    *((0, 0, False, 0, 1), (1, 0, False, 1, 2), (0, 0, True, 4, 6), (1, 0, True, 7, 9)),
    *((0, 1, False, 1, 2), (0, 1, True, 2, 4), (1, 1, False, 4, 5), (1, 1, True, 5, 7)),
]


def timeline(visits=VISITS):
    names = ("shard", "stage", "backward", "began_s", "ended_s")
    return [dict(zip(names, visit, strict=True)) for visit in visits]


def test_equal_visits_have_the_idle_share_of_theory():
    assert stages.scheduled_idle(timeline()) == pytest.approx(stages.theory(2))
    assert stages.theory(2) == pytest.approx(1 / 3)


def test_a_device_that_waits_for_a_shard_loses_nothing_between_visits():
    assert stages.changing_idle(timeline()) == 0


def test_what_a_visit_begins_after_it_could_is_lost_between_visits():
    late = [*VISITS[:3], (1, 0, True, 7.5, 9.5), *VISITS[4:]]
    assert stages.changing_idle(timeline(late)) == pytest.approx(0.5 / (2 * 9.5))


def test_the_variation_is_that_of_visits_of_one_kind():
    assert stages.variation(timeline()) == 0
    uneven = [(0, 0, False, -2, 1), *VISITS[1:]]  # three seconds and one: 2 on average, off by 1
    assert stages.variation(timeline(uneven)) == pytest.approx((1 / 2) / 4)
