"""Marks for single parameters of tests."""

import pytest


def slow(*values):
    """Return the values of a parametrized test that belongs to `make slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)
