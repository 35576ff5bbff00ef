"""Gradients between emulated accelerators of several processes, through their own backend."""

import pytest
import torch

import emu
from launched import launched

CASES = 6


def exchanged(tmp_path, processes, mode, seed, *fault):
    """Run the job; return what each process has found."""
    finished = launched(processes, "exchanged.py", tmp_path / "found", mode, seed, *fault)
    assert finished.returncode == 0, finished.stderr
    return [torch.load(tmp_path / f"found.{rank}") for rank in range(processes)]


def sums_of(found):
    return [(name, one) for name, steps in found.items() if name != "refused" for one in steps]


@pytest.mark.parametrize(
    ("processes", "mode"),
    [
        (2, "lazy"),
        (3, "lazy"),
        (4, "random"),
        pytest.param(2, "thread", marks=pytest.mark.slow),
        pytest.param(4, "lazy", marks=pytest.mark.slow),
        pytest.param(3, "random", marks=pytest.mark.slow),
        pytest.param(4, "thread", marks=pytest.mark.slow),
    ],
)
def test_sums_have_the_bits_of_one_place_and_never_pass_the_host(tmp_path, processes, mode):
    for found in exchanged(tmp_path, processes, mode, 0):
        assert len(found) == CASES
        for name, one in sums_of(found):
            assert one["right"], name
            assert one["copies"] == (0, 0), name
            assert set(one["waits"]) <= {emu.POLLING}, name
            assert one["waits"][emu.POLLING] <= 1, name
