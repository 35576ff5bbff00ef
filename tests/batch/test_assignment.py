"""Shards assigned to processes: by their speeds, and the same in every process."""

import pytest

from evenstep.batch import ProcessAssignment
from evenstep.batch.assignment import MOST_AHEAD, PERIOD_STEPS, OneLaneChoice

MIDDLE = PERIOD_STEPS // 2


def lengths(assignment, step, filled=8):
    return [len(run) for run in assignment.runs(filled, step)]


def test_runs_are_contiguous_and_complete():
    for filled in range(1, 9):
        runs = ProcessAssignment([2, 1, 1]).runs(filled, 0)
        assert [shard for run in runs for shard in run] == list(range(filled))


def test_at_first_the_number_of_devices_counts():
    assert lengths(ProcessAssignment([3, 1]), 0) == [6, 2]


def test_measured_speeds_count_from_the_next_period_on():
    assignment = ProcessAssignment([1, 1])
    for step in range(PERIOD_STEPS):
        assert lengths(assignment, step) == [4, 4]
        assignment.record_speeds(step, [300.0, 100.0])
    assert lengths(assignment, PERIOD_STEPS - 1) == [4, 4]
    assert lengths(assignment, PERIOD_STEPS) == [6, 2]


def test_a_process_that_is_ahead_assigns_like_one_that_is_behind():
    """A process may ask for a step half a period before the last one has recorded the speeds."""
    ahead, behind = ProcessAssignment([1, 1]), ProcessAssignment([1, 1])
    speeds = [[1.0 + step % 7, 1.0 + step % 3] for step in range(6 * PERIOD_STEPS)]
    for step, reported in enumerate(speeds):
        ahead.record_speeds(step, reported)
        if step >= MIDDLE - 1:
            late = step - (MIDDLE - 1)
            assert ahead.runs(8, step) == behind.runs(8, step)
            behind.record_speeds(late, speeds[late])


@pytest.mark.parametrize("in_flight", [1, 7, 8, 100, 1000])
def test_all_processes_know_the_speeds_when_they_are_needed(in_flight):
    """Of a process that has so many steps in flight, and loads batches ahead of them."""
    assignment = ProcessAssignment([1, 1], in_flight)
    first = assignment.period - MOST_AHEAD  # may ask for the part of a step of the next period
    for step in range(first - in_flight):
        assignment.record_speeds(step, [300.0, 100.0])
    assert lengths(assignment, assignment.period) == [6, 2]


@pytest.mark.parametrize("unknown", [[0.0, 5.0], [0.0, 0.0]])
def test_an_unknown_speed_changes_nothing(unknown):
    assignment = ProcessAssignment([1, 1])
    assignment.record_speeds(MIDDLE, unknown)
    assert lengths(assignment, PERIOD_STEPS) == [4, 4]


def test_old_speeds_are_forgotten():
    assignment = ProcessAssignment([1, 1])
    for step in range(50 * PERIOD_STEPS):
        assignment.record_speeds(step, [1.0 + step, 1.0])
    assert len(vars(assignment)["_speeds"]) == 3


def chosen(choice, together_s, alone_s, steps):
    """Take steps of known durations; return for each whether one lane computed it alone."""
    refused = []
    for _ in range(steps):
        refused.append(choice.is_better())
        choice.learn(refused[-1], alone_s if refused[-1] else together_s)
    return refused


def test_help_that_costs_more_than_it_saves_is_refused():
    refused = chosen(OneLaneChoice(), together_s=1.5e-3, alone_s=1e-3, steps=2000)
    assert not any(refused[:256])
    assert sum(refused[300:]) > 0.9 * 1700
    assert not all(refused[300:])  # tried again


def test_help_that_saves_time_is_taken():
    refused = chosen(OneLaneChoice(), together_s=1e-3, alone_s=1.9e-3, steps=2000)
    assert 0 < sum(refused) < 0.1 * 2000


def test_long_steps_are_always_shared():
    assert not any(chosen(OneLaneChoice(), together_s=0.1, alone_s=1e-3, steps=1000))


def test_help_is_taken_again_when_steps_get_longer():
    choice = OneLaneChoice()
    chosen(choice, together_s=1.5e-3, alone_s=1e-3, steps=600)
    refused = chosen(choice, together_s=3e-3, alone_s=4e-3, steps=1000)
    assert sum(refused[-500:]) < 0.1 * 500
