"""Marks of tests, and of single parameters."""

import importlib.util

import pytest


def slow(*values):
    """Return the values of a parametrized test that belongs to `make slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


LIGHTNING = [
    pytest.mark.xdist_group("lightning"),  # its import takes seconds
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="pip install evenstep[lightning]"
    ),
]
