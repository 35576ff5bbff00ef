"""A seeded call draws the same numbers everywhere, and leaves no trace."""

import random

import numpy as np
import pytest
import torch

from evenstep.data.generators import DEFAULTS, call_seeded, generators_of


def draw(own=None) -> tuple[float, ...]:
    numbers = torch.rand(()).item(), random.random(), np.random.random()
    return numbers if own is None else (*numbers, own.random())


def disturb() -> None:
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)


def global_state() -> tuple[list[int], object, str]:
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def test_a_seed_gives_the_same_draws_from_any_state():
    own = np.random.default_rng()
    generators = generators_of([own])
    first = call_seeded(generators, 2**62 + 7, draw, own)
    disturb()
    own.random()
    assert call_seeded(generators, 2**62 + 7, draw, own) == first


@pytest.mark.parametrize("other", [0, 1, 2**31 + 7])
def test_another_seed_gives_other_draws_from_each_generator(other):
    own = random.Random()
    generators = generators_of([own])
    first, second = (call_seeded(generators, seed, draw, own) for seed in (7, other))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_everything_is_put_back():
    before = global_state()
    call_seeded(DEFAULTS, 7, draw)
    assert global_state() == before


def test_everything_is_put_back_after_an_exception():
    before = global_state()

    def lose():
        raise KeyError("lost", draw())

    with pytest.raises(KeyError, match="lost"):
        call_seeded(DEFAULTS, 7, lose)
    assert global_state() == before
