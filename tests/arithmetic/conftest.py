"""Every variant of the C part that this processor can run."""

from collections.abc import Iterator

import pytest
import torch

from evenstep.arithmetic import native


def runnable() -> list[str]:
    widest = torch.backends.cpu.get_cpu_capability()
    fit = {"AVX512": ["plain", "avx2", "avx512"], "AVX2": ["plain", "avx2"]}.get(widest, ["plain"])
    return [variant for variant in fit if variant in native.variants()]


@pytest.fixture(params=["plain", "avx2", "avx512"])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with each variant's functions."""
    if request.param not in runnable():
        pytest.skip(f"this processor can't run the variant {request.param}")
    with native.using(request.param):
        yield request.param
