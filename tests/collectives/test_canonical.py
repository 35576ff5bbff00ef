"""The sum over processes: for any runs and buckets, the bits of the sum in one process."""

import operator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_partition import runs_at

from evenstep.collectives import Forest, TreeSum, canonical, canonical_sum, connect, tree_sum
from evenstep.errors import PeerError
from over_threads import Counting, on_each, on_each_of
from reference import assert_same_bits


def vectors(shards, elements, dtype=torch.float32):
    """Return numbers of very different magnitude: other orders of addition round differently."""
    generator = torch.Generator().manual_seed(elements + shards)
    numbers = torch.randn(shards, elements, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-12, 12, (shards, elements), generator=generator)
    return list((numbers * 2.0**exponents).to(dtype))


def partials_of(trees, rank, leaves):
    tree = TreeSum(trees.plans[rank], operator.add)
    for shard in trees.runs[rank]:
        tree.put(shard, leaves[shard])
    return tree.take_partials()


def sum_over_processes(transports, trees, leaves, bucket_bytes):
    def part(end):
        out = torch.empty_like(leaves[0])
        canonical_sum(
            end, trees, partials_of(trees, end.rank, leaves), out, bucket_bytes=bucket_bytes
        )
        return out

    return on_each(transports, part)


@settings(max_examples=60)
@given(
    shards=st.integers(1, 20),
    elements=st.integers(0, 300),
    bucket_bytes=st.integers(1, 1500),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    small_bytes=st.sampled_from([0, 200, canonical.SMALL_BYTES]),
    data=st.data(),
)
def test_any_runs_and_buckets_give_the_sum_of_one_process(
    shards, elements, bucket_bytes, dtype, small_bytes, data
):
    filled = data.draw(st.integers(1, shards))
    cuts = data.draw(st.lists(st.integers(0, filled), max_size=4))
    leaves = vectors(shards, elements, dtype)[:filled]
    expected = tree_sum([*leaves, *[None] * (shards - filled)], operator.add)
    trees = Forest(shards, filled, runs_at(filled, cuts))
    with mock.patch.object(canonical, "SMALL_BYTES", small_bytes):
        sums = sum_over_processes(connect(len(cuts) + 1), trees, leaves, bucket_bytes)
    for out in sums:
        assert_same_bits({"sum": out}, {"sum": expected})


def test_another_order_would_be_another_sum():
    """The vectors make the order matter, so the test above can fail."""
    leaves = vectors(8, 100)
    in_order = leaves[0].clone()
    for leaf in leaves[1:]:
        in_order += leaf
    assert not torch.equal(in_order, tree_sum(leaves, operator.add))


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_with_one_partial_sum_each_it_sends_what_a_ring_all_reduce_sends(processes):
    leaves = vectors(8, 200_000)
    each = 8 // processes
    trees = Forest(8, 8, [range(first, first + each) for first in range(0, 8, each)])
    ends = [Counting(end) for end in connect(processes)]
    sum_over_processes(ends, trees, leaves, 400_000)
    ring = 2 * (processes - 1) / processes * leaves[0].nbytes
    for end in ends:
        assert abs(end.sent - ring) <= 0.02 * ring


@pytest.mark.parametrize(
    ("elements", "processes", "messages"),
    [(10, 8, 1), (250_000, 2, 1), (250_000, 4, 2), (10**6, 2, 2), (1_200_000, 2, 2)],
)
def test_messages_from_each_process_to_each_other(elements, processes, messages):
    """A vector that is little larger than the size of a piece is one piece."""
    trees = Forest(processes, processes, [range(one, one + 1) for one in range(processes)])
    ends = [Counting(end) for end in connect(processes)]
    sum_over_processes(ends, trees, vectors(processes, elements), 4 << 20)
    assert {len(end.tags) for end in ends} == {messages * (processes - 1)}


@pytest.mark.parametrize("elements", [10, 100_000])
def test_partial_sums_are_left_as_they_were(elements):
    leaves = vectors(8, elements)
    trees = Forest(8, 8, [range(3), range(3, 4), range(4, 7), range(7, 8)])

    def part(end):
        partials = partials_of(trees, end.rank, [leaf.clone() for leaf in leaves])
        before = [one.clone() for one in partials]
        canonical_sum(end, trees, partials, torch.empty(elements))
        assert_same_bits(dict(enumerate(partials)), dict(enumerate(before)))

    on_each_of(4, part)


def test_a_process_that_sends_nothing_is_named():
    trees = Forest(4, 4, [range(2), range(2, 4)])
    leaves = vectors(4, 10)

    def part(end):
        if end.rank == 1:
            return None
        with pytest.raises(PeerError, match=r"rank 1 sent nothing for 0\.05 s") as caught:
            canonical_sum(end, trees, partials_of(trees, 0, leaves), torch.empty(10))
        return caught.value.rank

    assert on_each_of(2, part, timeout_s=0.05) == [1, None]


@pytest.mark.parametrize(
    ("processes", "partials", "most"),
    [
        (2, 2, 1 << 20),  # n bytes in one round, n / 2 twice in two
        (2, 4, 128 << 10),  # 2 n, and n + n / 2
        (3, 3, 96 << 10),  # 2 n, and 2 n / 3 twice
    ],
)
def test_one_round_sends_at_most_64_kib_more_than_two(processes, partials, most):
    assert canonical.takes_one_round(processes, partials, most)
    assert not canonical.takes_one_round(processes, partials, most + 4)
