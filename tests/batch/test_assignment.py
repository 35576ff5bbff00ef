"""Shards assigned to processes: by their speeds, and the same in every process."""

import pytest

from evenstep.batch import ProcessAssignment
from evenstep.batch.assignment import PERIOD_STEPS

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
