"""The classic sums over processes: whole numbers, so that every order gives the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.book.classic import CLASSIC
from evenstep.collectives import connect
from over_threads import Counting, on_each


def numbers(rank, elements):
    return torch.arange(elements, dtype=torch.float64) * (rank + 1) + rank


def summed(name, ends, elements):
    def part(end):
        tensor = numbers(end.rank, elements)
        CLASSIC[name](end, tensor)
        return tensor

    return on_each(ends, part)


@pytest.mark.parametrize("name", CLASSIC)
@settings(max_examples=25)
@given(processes=st.integers(1, 9), elements=st.integers(0, 50))
def test_everybody_has_the_sum(name, processes, elements):
    expected = sum(numbers(rank, elements) for rank in range(processes))
    for tensor in summed(name, connect(processes), elements):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize(
    ("name", "of_tensor"),
    [("root", [7, 1]), ("tree", [3, 2, 1]), ("ring", [7 / 4]), ("sharded", [7 / 4])],
)
def test_each_sends_what_its_formula_says(name, of_tensor):
    ends = [Counting(end) for end in connect(8)]
    summed(name, ends, 800)
    assert {end.sent / 6400 for end in ends} == set(of_tensor)


def test_the_order_is_not_the_canonical_one():
    """What these round is another thing for another number of processes."""
    values = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    results = set()
    for name in CLASSIC:

        def part(end, name=name):
            tensor = values[end.rank].clone()
            CLASSIC[name](end, tensor)
            return tensor.item()

        results |= set(on_each(connect(4), part))
    assert len(results) > 1
