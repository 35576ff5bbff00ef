"""Shards dealt to processes: by their speeds, at the same step for all."""

import pytest

from evenstep.batch import Dealing
from evenstep.batch.assignment import PERIOD_STEPS

MIDDLE = PERIOD_STEPS // 2


def lengths(dealing, step, filled=8):
    return [len(run) for run in dealing.runs(filled, step)]


def test_runs_are_contiguous_and_complete():
    for filled in range(1, 9):
        runs = Dealing([2, 1, 1]).runs(filled, 0)
        assert [shard for run in runs for shard in run] == list(range(filled))


def test_at_first_the_number_of_devices_counts():
    assert lengths(Dealing([3, 1]), 0) == [6, 2]


def test_what_is_measured_counts_from_the_next_period_on():
    dealing = Dealing([1, 1])
    for step in range(PERIOD_STEPS):
        assert lengths(dealing, step) == [4, 4]
        dealing.hear(step, [300.0, 100.0])
    assert lengths(dealing, PERIOD_STEPS - 1) == [4, 4]
    assert lengths(dealing, PERIOD_STEPS) == [6, 2]


def test_who_is_ahead_and_who_is_behind_deal_alike():
    """A process may ask for a step half a period before the last one has heard of the speeds."""
    ahead, behind = Dealing([1, 1]), Dealing([1, 1])
    speeds = [[1.0 + step % 7, 1.0 + step % 3] for step in range(6 * PERIOD_STEPS)]
    for step, told in enumerate(speeds):
        ahead.hear(step, told)
        if step >= MIDDLE - 1:
            late = step - (MIDDLE - 1)
            assert ahead.runs(8, step) == behind.runs(8, step)
            behind.hear(late, speeds[late])


@pytest.mark.parametrize("unknown", [[0.0, 5.0], [0.0, 0.0]])
def test_a_speed_that_nobody_knows_changes_nothing(unknown):
    dealing = Dealing([1, 1])
    dealing.hear(MIDDLE, unknown)
    assert lengths(dealing, PERIOD_STEPS) == [4, 4]


def test_old_speeds_are_forgotten():
    dealing = Dealing([1, 1])
    for step in range(50 * PERIOD_STEPS):
        dealing.hear(step, [1.0 + step, 1.0])
    assert len(vars(dealing)["_speeds"]) == 3
