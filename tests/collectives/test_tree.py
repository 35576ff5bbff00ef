"""The canonical tree, by its parentheses: here `add` writes down what is added to what."""

import functools
import itertools
import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.collectives import TreePlan, TreeSum, tree_plan, tree_sum
from evenstep.collectives.tree import split_point


def write(left, right):
    return f"({left}+{right})"


def anything(value):
    return True


def canonical(lo, hi, filled):
    """Write down the node [lo, hi) by its definition; None if all its shards are empty."""
    if hi - lo == 1:
        return str(lo) if lo in filled else None
    powers = [1 << exponent for exponent in range(12)]
    middle = lo + max(power for power in powers if power < hi - lo)
    left, right = canonical(lo, middle, filled), canonical(middle, hi, filled)
    if left is None or right is None:
        return left or right
    return write(left, right)


def leaves(shards, filled):
    return [str(shard) if shard in filled else None for shard in range(shards)]


def put_one(tree, shard, *, claim):
    """Put shard `shard` as a lane does: accumulated onto its left sibling, or by itself."""
    node, left = tree.claim(shard, anything) if claim else (shard, None)
    tree.put(node, str(shard) if left is None else write(left, shard))


def root_of(tree):
    (root,) = tree.take_partials()
    return root


def sum_in_order(shards, filled, order, *, claim):
    tree = TreeSum(TreePlan(shards, filled), write)
    for shard in order:
        put_one(tree, shard, claim=claim)
    return root_of(tree)


EVERY_PREFIX = [(shards, filled) for shards in range(1, 21) for filled in range(1, shards + 1)]


def test_the_tree_of_seven_shards():
    assert tree_sum(list("abcdefg"), write) == "(((a+b)+(c+d))+((e+f)+g))"


@pytest.mark.parametrize(
    ("node", "middle"), [((0, 2), 1), ((0, 3), 2), ((0, 8), 4), ((0, 9), 8), ((4, 7), 6)]
)
def test_a_node_splits_at_the_largest_smaller_power_of_two(node, middle):
    assert split_point(*node) == middle


def test_the_recursive_sum_is_canonical():
    for shards, filled in EVERY_PREFIX:
        expected = canonical(0, shards, range(filled))
        assert tree_sum(leaves(shards, range(filled)), write) == expected


@given(shards=st.integers(1, 70), data=st.data())
def test_the_recursive_sum_skips_empty_shards(shards, data):
    filled = data.draw(st.sets(st.integers(0, shards - 1)))
    assert tree_sum(leaves(shards, filled), write) == canonical(0, shards, filled)


def test_the_sum_of_no_values_is_none():
    assert tree_sum([], write) is None
    assert tree_sum([None] * 5, write) is None
    assert TreePlan(5, []).partials == []


@pytest.mark.parametrize("claim", [False, True])
def test_the_sum_under_way_is_canonical_for_every_prefix(claim):
    for shards, filled in EVERY_PREFIX:
        expected = canonical(0, shards, range(filled))
        for order in (range(filled), reversed(range(filled))):
            tree = TreeSum(tree_plan(shards, filled), write)
            for shard in order:
                put_one(tree, shard, claim=claim)
            assert root_of(tree) == expected


@pytest.mark.parametrize("claim", [False, True])
@pytest.mark.parametrize("shards", range(1, 7))
def test_every_order_gives_the_same_parentheses(shards, claim):
    expected = canonical(0, shards, range(shards))
    for order in itertools.permutations(range(shards)):
        assert sum_in_order(shards, range(shards), order, claim=claim) == expected


@given(shards=st.integers(7, 40), claim=st.booleans(), data=st.data())
def test_any_order_and_any_empty_shards(shards, claim, data):
    filled = data.draw(st.sets(st.integers(0, shards - 1), min_size=1))
    order = data.draw(st.permutations(sorted(filled)))
    expected = canonical(0, shards, filled)
    assert sum_in_order(shards, filled, order, claim=claim) == expected


@pytest.mark.parametrize("claim", [False, True])
@pytest.mark.parametrize("threads", [2, 5])
def test_several_threads_give_the_same_parentheses(threads, claim):
    shards = 37
    expected = canonical(0, shards, range(shards))
    for attempt in range(30):
        order = random.Random(attempt).sample(range(shards), shards)
        tree = TreeSum(tree_plan(shards, shards), write)
        start = threading.Barrier(threads)

        def bring(lane, tree=tree, order=order, start=start):
            start.wait()
            for shard in order[lane::threads]:
                put_one(tree, shard, claim=claim)

        workers = [threading.Thread(target=bring, args=(lane,)) for lane in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert root_of(tree) == expected


def test_each_value_is_added_once_and_the_tree_is_empty_afterwards():
    added = []
    tree = TreeSum(tree_plan(5, 5), lambda left, right: added.append((left, right)) or left + right)
    for shard in (3, 1, 4, 0, 2):
        tree.put(shard, 10**shard)
    assert root_of(tree) == 11111
    assert len(added) == 4
    with pytest.raises(KeyError):
        root_of(tree)


def test_claim_hands_out_the_left_sibling_and_only_that():
    tree = TreeSum(tree_plan(4, 4), write)
    assert tree.claim(1, anything) == (1, None)  # no value is there yet
    tree.put(1, "1")
    assert tree.claim(0, anything) == (0, None)  # 1 is there, but on the right
    tree.put(0, "0")
    assert tree.claim(2, anything) == (2, None)  # (0+1) is no sibling of 2, but of 2's parent
    tree.put(2, "2")
    parent, left = tree.claim(3, anything)
    assert left == "2"
    tree.put(parent, write(left, "3"))
    assert root_of(tree) == "((0+1)+(2+3))"


def test_claim_hands_out_a_sum_on_the_left():
    tree = TreeSum(tree_plan(3, 3), write)
    tree.put(0, "0")
    tree.put(1, "1")
    parent, left = tree.claim(2, lambda value: value == "(0+1)")
    assert left == "(0+1)"
    tree.put(parent, write(left, "2"))
    assert root_of(tree) == "((0+1)+2)"


def test_claim_leaves_a_value_that_does_not_fit():
    tree = TreeSum(tree_plan(2, 2), write)
    tree.put(0, "0")
    asked = []
    assert tree.claim(1, lambda value: asked.append(value) or False) == (1, None)
    assert asked == ["0"]
    tree.put(1, "1")
    assert root_of(tree) == "(0+1)"


def test_a_claimed_value_is_not_handed_out_twice():
    tree = TreeSum(tree_plan(2, 2), write)
    tree.put(0, "0")
    parent, left = tree.claim(1, anything)
    assert tree.claim(1, anything) == (1, None)
    tree.put(parent, write(left, "1"))
    assert root_of(tree) == "(0+1)"


def test_a_lone_shard_is_the_root():
    tree = TreeSum(tree_plan(8, 1), write)
    assert tree.claim(0, anything) == (0, None)
    tree.put(0, "0")
    assert root_of(tree) == "0"


def test_floats_in_another_order_have_other_bits():
    """The order matters, so comparisons of bits can fail."""
    values = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    expected = ((values[0] + values[1]) + (values[2] + values[3])) + (
        (values[4] + values[5]) + values[6]
    )
    assert torch.equal(tree_sum(list(values), torch.add), expected)
    left_to_right = functools.reduce(torch.add, values)
    assert not torch.equal(left_to_right, expected)
    assert not torch.equal(tree_sum(list(values.flip(0)), torch.add), expected)


@pytest.mark.parametrize("shards", range(2, 12))
def test_the_sum_of_some_shards_can_be_put_at_once(shards):
    plan = tree_plan(shards, shards)
    for span in plan.nodes():
        tree = TreeSum(plan, write)
        tree.put(plan.node_of(span), canonical(span.start, span.stop, span))
        for shard in {*range(shards)} - {*span}:
            tree.put(shard, str(shard))
        assert root_of(tree) == canonical(0, shards, range(shards))
