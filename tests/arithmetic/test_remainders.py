"""Remainders, ranks and evenly spaced numbers."""

import math
from fractions import Fraction

import pytest
import torch

from evenstep.arithmetic.mode import PortableMode
from exact_floats import odd_values, rounded, same

COUNT = 3000


def remainder(a, b):
    """Return a − b · trunc(a / b), by fractions."""
    if not math.isfinite(a) or math.isnan(b) or b == 0:
        return math.nan
    if math.isinf(b):
        return a
    exact = Fraction(a) - Fraction(b) * math.trunc(Fraction(a) / Fraction(b))
    return math.copysign(float(exact), a)


def test_remainders_are_exact(variant):
    a, b = odd_values(COUNT, 1), odd_values(COUNT, 2)
    expected = torch.tensor([remainder(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
    moved = torch.where((expected != 0) & ((expected < 0) != (b < 0)), expected + b, expected)
    with PortableMode():
        assert same(torch.fmod(a, b), expected)
        assert same(a.clone().fmod_(b), expected)
        assert same(torch.remainder(a, b), moved)
        assert same(a % b, moved)


@pytest.mark.parametrize("by", [3.0, -0.7, 1e-3])
def test_quotients_rounded_down(by):
    a = odd_values(COUNT, 3, special=False)
    a = torch.where(a.abs() < 2**20 * abs(by), a, a.sign())  # a quotient that float32 has
    divisor = Fraction(float(torch.tensor(by)))
    expected = [math.floor(Fraction(x) / divisor) for x in a.tolist()]
    with PortableMode():
        found = [torch.div(a, by, rounding_mode="floor"), a // by]
    assert found[0].tolist() == expected
    assert found[1].tolist() == expected


@pytest.mark.parametrize("decimals", [0, 2, -1])
def test_rounding_to_decimals(decimals):
    a = odd_values(COUNT, 4, special=False).clamp(-1e30, 1e30)
    scale = Fraction(10) ** abs(decimals)

    def once(x):
        up = rounded(Fraction(x) * scale if decimals >= 0 else Fraction(x) / scale)
        whole = Fraction(round(Fraction(up)))
        return rounded(whole / scale if decimals >= 0 else whole * scale)

    with PortableMode():
        found = torch.round(a, decimals=decimals)
    assert found.tolist() == [once(x) for x in a.tolist()]


@pytest.mark.parametrize("largest", [True, False])
def test_first_of_equal_numbers_come_first(largest):
    values = torch.randint(-3, 3, (40, 30), generator=torch.Generator().manual_seed(5)).float()
    with PortableMode():
        found, places = values.topk(7, dim=1, largest=largest)
        ranked, order = values.sort(descending=largest)
    for row, top, at, whole, by in zip(
        *(one.tolist() for one in (values, found, places, ranked, order)), strict=True
    ):
        expected = sorted(
            range(30), key=lambda place, row=row: -row[place] if largest else row[place]
        )
        assert by == expected
        assert at == expected[:7]
        assert whole == [row[place] for place in expected]
        assert top == whole[:7]


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("count", [1, 8, 9])
def test_medians(count, keepdim):
    values = odd_values(40 * count, 6).reshape(40, count)
    with PortableMode():
        found, places = values.median(1, keepdim)
        known, known_places = values.nanmedian(1, keepdim)
    assert same(found, values.median(1, keepdim)[0])
    assert same(known, values.nanmedian(1, keepdim)[0])
    assert same(values.gather(1, places.view(40, 1)).view(found.shape), found)
    assert same(values.gather(1, known_places.view(40, 1)).view(known.shape), known)


@pytest.mark.parametrize("given", [(0, 1, 0.1), (2.5, -3.0, -0.7), (0.0, 5.0, 1.0), (3, 3.0, 1)])
def test_evenly_spaced_numbers(given):
    start, end, step = given
    with PortableMode():
        found = torch.arange(start, end, step)
    assert len(found) == len(torch.arange(start, end, step))
    expected = [float(torch.tensor(start + place * step)) for place in range(len(found))]
    assert found.tolist() == expected


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 100])
def test_evenly_spaced_numbers_from_end_to_end(steps):
    with PortableMode():
        found = torch.linspace(-1, 3, steps)
    assert found.shape == (steps,)
    exact = [-1 + 4 * Fraction(place, max(steps - 1, 1)) for place in range(steps)]
    # Up to three roundings in float64 of numbers below 4, and one to float32.
    assert all(abs(Fraction(x) - y) <= 2**-23 for x, y in zip(found.tolist(), exact, strict=True))
    if steps > 1:
        assert found[0] == -1
        assert found[-1] == 3


def test_integers_are_those_of_torch():
    with PortableMode():
        found = [
            torch.arange(7),
            torch.arange(2, 9, 3),
            torch.arange(5) // 2,
            torch.arange(-5, 5) % 3,
        ]
    assert found[0].tolist() == [*range(7)]
    assert found[1].tolist() == [2, 5, 8]
    assert found[2].tolist() == [0, 0, 1, 1, 2]
    assert found[3].tolist() == [x % 3 for x in range(-5, 5)]
