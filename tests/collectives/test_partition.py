"""The tree divided among processes: the same additions, in parentheses, as in one process."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.collectives import Forest, TreeSum, forest, tree_sum


def write(left, right):
    return f"({left}+{right})"


def sum_over(shards, filled, runs):
    """Sum the names of shards as processes do: first each its partial sums, then all of them."""
    trees = Forest(shards, filled, runs)
    partials = []
    for run, plan in zip(runs, trees.plans, strict=True):
        tree = TreeSum(plan, write)
        for shard in reversed(run):
            tree.put(shard, str(shard))
        partials += tree.take_partials()
    return trees.add_up(partials, write)


def canonical(shards, filled):
    return tree_sum([str(shard) if shard < filled else None for shard in range(shards)], write)


def runs_at(filled, cuts):
    return [range(lo, hi) for lo, hi in itertools.pairwise([0, *sorted(cuts), filled])]


@pytest.mark.parametrize("shards", range(1, 10))
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_runs_of_every_prefix_give_the_tree(shards, processes):
    for filled in range(1, shards + 1):
        for cuts in itertools.combinations_with_replacement(range(filled + 1), processes - 1):
            assert sum_over(shards, filled, runs_at(filled, cuts)) == canonical(shards, filled)


@given(shards=st.integers(1, 70), data=st.data())
def test_any_runs_give_the_tree(shards, data):
    filled = data.draw(st.integers(1, shards))
    cuts = data.draw(st.lists(st.integers(0, filled), max_size=9))
    assert sum_over(shards, filled, runs_at(filled, cuts)) == canonical(shards, filled)


def test_one_process_has_one_partial_sum():
    trees = Forest(8, 5, [range(5)])
    assert trees.spans == [range(5)]
    assert trees.adds == []


def test_halves_of_a_power_of_two_have_a_partial_sum_each():
    trees = Forest(8, 8, [range(4), range(4, 8)])
    assert trees.spans == [range(4), range(4, 8)]
    assert trees.owners == [0, 1]
    assert trees.adds == [(0, 1)]


def test_a_run_that_is_no_node_has_several_partial_sums():
    trees = Forest(8, 8, [range(3), range(3, 8)])
    assert trees.spans == [range(2), range(2, 3), range(3, 4), range(4, 8)]
    assert trees.partials_of(0) == [0, 1]
    assert trees.partials_of(1) == [2, 3]
    assert trees.adds == [(1, 2), (0, 1), (0, 3)]


def test_a_process_without_shards_has_no_partial_sum():
    trees = Forest(2, 2, [range(1), range(1, 2), range(2, 2)])
    assert trees.partials_of(2) == []


def test_the_same_forest_is_made_once():
    assert forest(8, 8, (range(4), range(4, 8))) is forest(8, 8, (range(4), range(4, 8)))
