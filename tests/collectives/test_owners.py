"""Who owns what, and sums that go to their owners."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.collectives import SumAtOwner, assign_owners, connect, forest, tree_sum
from reference import assert_same_bits


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), owners=st.integers(1, 9))
def test_every_item_has_an_owner_and_no_owner_gets_much_more_than_its_share(sizes, owners):
    owner_of = assign_owners(sizes, owners)
    assert len(owner_of) == len(sizes)
    assert all(0 <= owner < owners for owner in owner_of)
    loads = [sum(s for s, o in zip(sizes, owner_of, strict=True) if o == n) for n in range(owners)]
    assert max(loads) <= sum(sizes) / owners + max(sizes, default=0)


def test_the_largest_is_dealt_first_and_ties_go_by_number():
    assert assign_owners([1, 5, 3, 3, 5], 2) == [0, 0, 0, 1, 1]
    assert assign_owners([2, 2, 2], 5) == [0, 1, 2]
    assert assign_owners([], 3) == []
    assert assign_owners([0, 0], 2) == [0, 0]


RUNS = [
    (range(3), range(3, 7)),
    (range(2), range(2, 2), range(2, 7)),
    (range(7), range(7, 7)),
]


@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("owner", [0, 1])
def test_the_sum_has_the_bits_of_the_tree_at_its_owner(runs, owner):
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(13, generator=generator) for _ in range(7)]
    trees = forest(7, 7, runs)
    found = {}

    def process(transport):
        rank = transport.rank
        own = [
            tree_sum(leaves[span.start : span.stop], torch.add).clone()
            for span, source in zip(trees.spans, trees.owners, strict=True)
            if source == rank
        ]
        out = (own or [torch.empty(13)])[0] if rank == owner else None
        piece = SumAtOwner(transport, trees, own, out, owner, 1, "a bucket")
        piece.add_up()
        piece.wait()
        found[rank] = out

    threads = [threading.Thread(target=process, args=(one,)) for one in connect(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = tree_sum(leaves, torch.add)
    assert_same_bits({"sum": found.pop(owner)}, {"sum": expected})
    assert not any(one is not None for one in found.values())
