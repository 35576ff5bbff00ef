"""The order of the examples is a permutation, and a pure function."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data import Cursor, epoch_order
from evenstep.errors import InputError

EPOCHS = st.integers(0, 10_000)
SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(examples=st.integers(0, 300), seed=SEEDS, epoch=EPOCHS)
def test_an_order_is_a_permutation(examples, seed, epoch):
    order = epoch_order(examples, seed, epoch)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(examples))


@given(seed=SEEDS, epoch=EPOCHS, elsewhere=st.integers(0, 1000))
def test_an_order_depends_on_its_arguments_alone(seed, epoch, elsewhere):
    order = epoch_order(100, seed, epoch)
    torch.manual_seed(elsewhere)
    epoch_order(50, elsewhere, epoch)
    assert torch.equal(epoch_order(100, seed, epoch), order)


def test_the_global_generator_stays_where_it_is():
    before = torch.get_rng_state()
    epoch_order(100, 3, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_seed_and_epoch_has_its_own_order():
    orders = {
        tuple(epoch_order(100, seed, epoch).tolist()) for seed in range(8) for epoch in range(8)
    }
    assert len(orders) == 64


@pytest.mark.parametrize("place", [(-1, 0), (0, -1)])
def test_a_cursor_counts_from_zero(place):
    with pytest.raises(InputError, match=r"-1.* count from 0"):
        Cursor(*place)


def test_a_cursor_is_frozen_and_compares_by_value():
    cursor = Cursor(2, 3)
    assert cursor == Cursor(epoch=2, step=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cursor.step = 4
