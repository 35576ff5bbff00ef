"""Every variant of the C part that this processor can run."""

from collections.abc import Iterator

import pytest

from evenstep.arithmetic import native


@pytest.fixture(params=["plain", "avx2", "avx512"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with each variant's functions."""
    if request.param not in native.runnable():
        pytest.skip(f"this processor can't run the variant {request.param}")
    with native.using(request.param):
        yield request.param
