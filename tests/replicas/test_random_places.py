"""Random models at random addresses have the bits of a plain loop over aligned clones."""

import os
import subprocess
import sys

import pytest

import random_places

PROCESSORS = {
    "as it is": {},
    # As on processors of other makers, MKL then rounds matrix products by addresses.
    "with other kernels": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


def test_random_models_at_random_addresses():
    assert random_places.differences(range(7, 12)) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # each part trains 400 models
@pytest.mark.parametrize("first", [0, 100])
@pytest.mark.parametrize("settings", PROCESSORS.values(), ids=PROCESSORS)
def test_200_random_models_at_random_addresses(settings, first):
    program = [sys.executable, random_places.__file__, str(first), str(first + 100)]
    done = subprocess.run(
        program, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "differences: []\n"
