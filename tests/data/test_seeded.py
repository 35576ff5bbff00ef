"""A seeded block draws the same numbers everywhere, and leaves no trace."""

import random

import numpy as np
import pytest
import torch

from evenstep.data.seeded import seeded


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.random()


def disturb() -> None:
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)


def global_state() -> tuple[list[int], object, str]:
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def test_a_seed_gives_the_same_draws_from_any_global_state():
    with seeded(2**62 + 7):
        first = draw()
    disturb()
    with seeded(2**62 + 7):
        assert draw() == first


@pytest.mark.parametrize("other", [0, 1, 2**31 + 7])
def test_another_seed_gives_other_draws_from_each_generator(other):
    with seeded(7):
        first = draw()
    with seeded(other):
        assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_everything_is_put_back():
    before, threads = global_state(), torch.get_num_threads()
    with seeded(7):
        draw()
        assert torch.get_num_threads() == 1
    assert global_state() == before
    assert torch.get_num_threads() == threads


def test_everything_is_put_back_after_an_exception():
    before, threads = global_state(), torch.get_num_threads()
    with pytest.raises(KeyError, match="lost"), seeded(7):
        raise KeyError("lost", draw())
    assert global_state() == before
    assert torch.get_num_threads() == threads
