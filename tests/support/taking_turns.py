"""Cases that take turns with the layouts: each value once, instead of the whole product."""

import itertools

import pytest

from checked import LAYOUTS


def in_turn(argument, values):
    """Parametrize `argument`, and `devices`, which is the next layout for each value.

    A contract is checked in one way on every layout, so that a product would prove no more.
    """
    cases = [
        pytest.param(value, LAYOUTS[name], id=f"{getattr(value, '__name__', value)}, {name}")
        for value, name in zip(values, itertools.cycle(LAYOUTS))
    ]
    return pytest.mark.parametrize((argument, "devices"), cases)
