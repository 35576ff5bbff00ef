"""Several processes, with any devices each, give the bits of one process."""

import json
import re
from collections import Counter

import pytest

from evenstep.data.fetching import COMPARED
from launched import alone, launched, torchrun

LAYOUTS = [
    ("1,1", 1, "plain"),
    pytest.param("1,1", 2, "network", marks=pytest.mark.slow),
    pytest.param("2,2", 1, "memory", marks=pytest.mark.slow),
    pytest.param("1,1,1", 1, "network", marks=pytest.mark.slow),
    pytest.param("2,1", 1, "memory", marks=pytest.mark.slow),
    pytest.param("2,1", 2, "plain", marks=pytest.mark.slow),
]
"""The devices of each process, the steps in flight, and the transport (see `jobs/same.py`)."""


def results_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


@pytest.fixture(scope="module", params=[pytest.param(7, marks=pytest.mark.slow), 8])
def one_process(request, tmp_path_factory):
    """The results of one process on one device."""
    out = tmp_path_factory.mktemp("alone")
    return request.param, results_of(alone("same.py", out, "1", request.param, 1), out, 0)


@pytest.mark.parametrize(("layout", "in_flight", "method"), LAYOUTS)
def test_every_layout_gives_what_one_process_gives(
    one_process, layout, in_flight, method, tmp_path
):
    shards, expected = one_process
    processes = len(layout.split(","))
    by = torchrun if layout == "1,1,1" else launched
    finished = by(processes, "same.py", tmp_path, layout, shards, in_flight, method)
    seen = []
    for rank in range(processes):
        found = results_of(finished, tmp_path, rank)
        assert found["results"] == expected["results"]
        seen += found["seen"]
    fetched = Counter(seen)
    assert fetched.keys() == {*range(203)}
    assert min(fetched.values()) == 2  # trained on once, predicted once
    compared = 50 + 64 + processes * 2 * COMPARED  # both first batches, and some for the digests
    assert fetched.total() == 2 * 203 + compared


@pytest.mark.slow
def test_a_slow_process_gets_fewer_shards_and_nothing_else_changes(tmp_path):
    """Five epochs of 40 steps: speeds measured in the first 64 steps count in the next 64."""
    (tmp_path / "alone").mkdir()
    expected = results_of(alone("uneven.py", tmp_path / "alone"), tmp_path / "alone", 0)
    finished = launched(2, "uneven.py", tmp_path)
    fast, slow = (results_of(finished, tmp_path, rank) for rank in range(2))
    assert fast["fingerprint"] == slow["fingerprint"] == expected["fingerprint"]
    for ours, theirs, all_shards in zip(
        fast["counts"], slow["counts"], expected["counts"], strict=True
    ):
        assert ours + theirs == all_shards
    assert fast["counts"][0] == slow["counts"][0]
    assert fast["counts"][-1] > slow["counts"][-1]


@pytest.mark.slow
def test_sequences_and_shared_tensors_in_two_processes(tmp_path):
    (tmp_path / "alone").mkdir()
    expected = results_of(alone("sequences.py", tmp_path / "alone"), tmp_path / "alone", 0)
    assert expected[1] == [5, 33, 4]
    finished = launched(2, "sequences.py", tmp_path)
    assert [results_of(finished, tmp_path, rank) for rank in range(2)] == [expected] * 2


@pytest.mark.slow
def test_compiled_shards_have_the_same_bits_in_two_processes(tmp_path):
    assert alone("hybridized.py", tmp_path).returncode == 0
    (tmp_path / "two").mkdir()
    finished = launched(2, "hybridized.py", tmp_path / "two")
    assert finished.returncode == 0, finished.stderr
    one = (tmp_path / "0.txt").read_text()
    fingerprint, why_not = one.split(" ", 1)
    assert len(fingerprint) == 64
    assert not why_not
    assert [(tmp_path / "two" / f"{rank}.txt").read_text() for rank in range(2)] == [one] * 2


@pytest.mark.slow
def test_a_process_that_cannot_compile_is_named_by_all(tmp_path):
    finished = launched(2, "hybridized.py", tmp_path, 1)
    assert "computed eagerly, because" in finished.stderr
    assert "no compiler is there" in finished.stderr
    for rank in range(2):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert re.match(r"rank 1 \(on \S+\) can't compile its shards, though others can", text)
