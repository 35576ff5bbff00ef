"""`partition="optimizer"` over processes: one result, whoever owns what."""

import json

import pytest

from launched import alone, torchrun


CASES = ("optimizers", "models", "clipped", "grouped", "gathered")


def results_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of one process on one device."""
    out = tmp_path_factory.mktemp("alone")
    return results_of(alone("owned.py", out, "whole", *CASES), out, 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_optimizer_and_model_keeps_its_bits(whole, processes, case, tmp_path):
    finished = torchrun(processes, "owned.py", tmp_path, "partition", case)
    for rank in range(processes):
        assert results_of(finished, tmp_path, rank)[case] == whole[case]
