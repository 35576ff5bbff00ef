"""Random numbers: their laws, and which of the generator's numbers they use."""

import math
from fractions import Fraction

import mpmath
import pytest
import torch
from torch.nn import functional, init

from evenstep.arithmetic.mode import PortableMode
from exact_floats import rounded

COUNT = 100_000
FARTHEST = math.sqrt(math.log(2e9) / (2 * COUNT))
"""A sample is farther from its law with a probability of at most 10⁻⁹ (Massart, 1990)."""
SEEN = {}

LAWS = {
    "normal": (lambda x: x.normal_(2.0, 3.0), lambda x: torch.special.ndtr((x - 2) / 3)),
    "uniform": (lambda x: x.uniform_(-2.0, 5.0), lambda x: (x + 2) / 7),
    "exponential": (lambda x: x.exponential_(4.0), lambda x: 1 - torch.exp(-4 * x)),
    "log_normal": (lambda x: x.log_normal_(0.5, 0.7), lambda x: _ndtr_of_log(x, 0.5, 0.7)),
}

DRAWS = {
    **{name: draw for name, (draw, _) in LAWS.items()},
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "geometric": lambda x: x.geometric_(0.3),
    "bernoulli of each": lambda x: x.copy_(torch.bernoulli(torch.full(x.shape, 0.3))),
    "dropout": lambda x: functional.dropout(x.fill_(1.0), 0.3),
    "normal of each": lambda x: x.copy_(torch.normal(torch.ones(x.shape), 2.0)),
}


def _ndtr_of_log(x, mean, std):
    return torch.special.ndtr((x.log() - mean) / std)


def drawn(name, shape, layout=torch.contiguous_format, seed=0):
    torch.manual_seed(seed)
    with PortableMode():
        return DRAWS[name](torch.empty(shape).to(memory_format=layout))


@pytest.mark.parametrize("name", LAWS)
def test_law(variant, name):
    values, _ = drawn(name, (COUNT,)).double().sort()
    law = LAWS[name][1](values)
    steps = torch.arange(COUNT + 1, dtype=torch.float64) / COUNT
    farthest = max((law - steps[1:]).abs().max(), (law - steps[:-1]).abs().max())
    assert float(farthest) < FARTHEST


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_bits_are_those_of_every_variant(variant, name, count):
    values = drawn(name, (count,))
    assert torch.equal(values, SEEN.setdefault((name, count), values))


@pytest.mark.parametrize("name", DRAWS)
def test_layout_in_memory_does_not_matter(name):
    shape = (2, 3, 5, 7)
    expected = drawn(name, shape)
    assert torch.equal(drawn(name, shape, torch.channels_last), expected)
    torch.manual_seed(0)
    with PortableMode():
        transposed = DRAWS[name](torch.empty(7, 5, 3, 2).permute(3, 2, 1, 0))
    assert torch.equal(transposed, expected)


@pytest.mark.parametrize("count", [1, 2, 9, 1000])
def test_normal_numbers_are_made_of_pairs(variant, count):
    half = (count + 1) // 2
    torch.manual_seed(1)
    u = torch.rand(2 * half).tolist()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with PortableMode():
        z = torch.randn(count).tolist()
    assert torch.equal(torch.get_rng_state(), state)
    for place, value in enumerate(z):
        first = place % half
        radius = mpmath.sqrt(-2 * mpmath.log(1 - mpmath.mpf(u[first])))
        turn = mpmath.cospi if place < half else mpmath.sinpi
        exact = radius * turn(2 * mpmath.mpf(u[half + first]))
        # In ulps, at most 2⁻²³: half of 1 of ln, ½ of the root, 1 of the sine, ½ of the product.
        assert abs(value - exact) <= abs(exact) * 2.5 * 2**-23


def test_uniform_numbers_are_scaled_and_moved():
    torch.manual_seed(3)
    u = torch.rand(2000).tolist()
    low, span = 0.1, float(torch.tensor(0.7 - 0.1))
    products = [rounded(Fraction(one) * Fraction(span)) for one in u]
    expected = [rounded(Fraction(one) + Fraction(float(torch.tensor(low)))) for one in products]
    torch.manual_seed(3)
    with PortableMode():
        values = torch.empty(2000).uniform_(low, 0.7)
    assert values.tolist() == expected


@pytest.mark.parametrize("law", ["normal_", "uniform_", "exponential_", "bernoulli_", "geometric_"])
def test_generator_of_the_caller_is_used(law):
    state = torch.get_rng_state()
    values = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(4)
        with PortableMode():
            given = [0.5] if law in ("geometric_", "bernoulli_") else []
            values.append(getattr(torch.empty(50), law)(*given, generator=generator))
            again = getattr(torch.empty(50), law)(*given, generator=generator)
    assert torch.equal(*values)
    assert not torch.equal(values[0], again)
    assert torch.equal(torch.get_rng_state(), state)


def near(observed, p, count=COUNT):
    """Whether a frequency is within six standard deviations of a probability."""
    return abs(float(observed) - p) < 6 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("p", [0.0, 0.001, 0.3, 0.9, 1.0])
def test_frequencies_of_bernoulli_numbers(p):
    torch.manual_seed(5)
    with PortableMode():
        ones = torch.empty(COUNT, dtype=torch.int64).bernoulli_(p)
        kept = functional.dropout(torch.ones(COUNT), 1 - p) if 0 < p < 1 else ones
    assert ones.float().mean() == p if p in (0, 1) else near(ones.float().mean(), p)
    assert (kept > 0).float().mean() == p if p in (0, 1) else near((kept > 0).float().mean(), p)


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_frequencies_of_geometric_numbers(p):
    torch.manual_seed(6)
    with PortableMode():
        values = torch.empty(COUNT).geometric_(p)
    for count in (1, 2, 3):
        assert near((values == count).float().mean(), p * (1 - p) ** (count - 1))


def test_frequencies_of_multinomial_numbers():
    weights = torch.tensor([0.5, 0.0, 1.5, 3.0])
    torch.manual_seed(7)
    with PortableMode():
        with_replacement = torch.multinomial(weights, COUNT, replacement=True)
        rows = torch.multinomial(weights.expand(COUNT, 4), 2)
    for found in (with_replacement, rows[:, 0]):
        counts = torch.bincount(found, minlength=4) / COUNT
        assert counts[1] == 0
        assert all(near(counts[one], float(weights[one]) / 5) for one in (0, 2, 3))
    assert bool((rows[:, 0] != rows[:, 1]).all())
    second = float(((rows[:, 0] == 3) & (rows[:, 1] == 2)).float().mean())
    assert near(second, 0.6 * 1.5 / 2.0)


@pytest.mark.parametrize("bad", [[-1.0, 2.0], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
def test_bad_weights_are_refused(bad):
    with PortableMode(), pytest.raises(RuntimeError, match="multinomial"):
        torch.multinomial(torch.tensor(bad), 1)


INITS = {
    "kaiming_uniform": (init.kaiming_uniform_, math.sqrt(2 / 300)),
    "kaiming_normal": (init.kaiming_normal_, math.sqrt(2 / 300)),
    "xavier_uniform": (init.xavier_uniform_, math.sqrt(2 / 500)),
    "xavier_normal": (init.xavier_normal_, math.sqrt(2 / 500)),
    "trunc_normal": (lambda x: init.trunc_normal_(x, 0.0, 0.02, -0.04, 0.04), 0.02 * 0.8796),
}


@pytest.mark.parametrize("name", INITS)
def test_initial_weights(variant, name):
    initialise, std = INITS[name]
    torch.manual_seed(8)
    with PortableMode():
        weights = initialise(torch.empty(200, 300))
    assert torch.equal(weights, SEEN.setdefault(name, weights))
    count = weights.numel()
    assert abs(float(weights.mean())) < 6 * std / math.sqrt(count)
    # The fourth moment is at most 3 σ⁴, so the variance's own deviation at most σ² √(2 / count).
    assert abs(float(weights.var()) / std**2 - 1) < 6 * math.sqrt(2 / count) + 1e-3
