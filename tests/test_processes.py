"""The promise over processes: torchrun's, with any devices each, against one process."""

import json

import pytest

from launched import alone, torchrun

LAYOUTS = [("1,1", 1), ("2,2", 1), ("1,1,1", 1), ("2,1", 1), ("2,1", 2)]
"""The devices of each process, and the steps in flight."""


def results_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


@pytest.fixture(scope="module", params=[7, 8])
def one_process(request, tmp_path_factory):
    """What comes out of one process on one device."""
    out = tmp_path_factory.mktemp("alone")
    return request.param, results_of(alone("same.py", out, "1", request.param, 1), out, 0)


@pytest.mark.parametrize(("layout", "in_flight"), LAYOUTS)
def test_every_layout_gives_what_one_process_gives(one_process, layout, in_flight, tmp_path):
    shards, expected = one_process
    processes = len(layout.split(","))
    finished = torchrun(processes, "same.py", tmp_path, layout, shards, in_flight)
    seen = []
    for rank in range(processes):
        told = results_of(finished, tmp_path, rank)
        assert told["results"] == expected["results"]
        seen += told["seen"]
    assert sorted(seen) == list(range(203))
