"""Several processes that each have stages of the network: what one process without any gives."""

import json

import pytest

from launched import alone, launched

LAYOUTS = [
    pytest.param("2,2", "2,4", 1, "none", marks=pytest.mark.slow),
    ("2,2", "2,2", 1, "owners"),
    pytest.param("2,1", "2,1", 2, "owners", marks=pytest.mark.slow),
    pytest.param("1,2,2", "2,2,2", 1, "none", marks=pytest.mark.slow),
]
"""The stages and the devices of each process, the steps in flight, and what has owners."""


def results_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


@pytest.mark.parametrize(("stages", "devices", "in_flight", "owned"), LAYOUTS)
def test_every_arrangement_gives_what_one_device_gives(stages, devices, in_flight, owned, tmp_path):
    expected = results_of(alone("staged.py", tmp_path, "1", "1", 1, "none"), tmp_path, 0)
    processes = len(stages.split(","))
    finished = launched(processes, "staged.py", tmp_path, stages, devices, in_flight, owned)
    for rank in range(processes):
        assert results_of(finished, tmp_path, rank) == expected
