"""What several processes call: loops that differ from one step a batch, calls of one alone."""

import json
import re

import pytest

from launched import alone, torchrun


def of_rank(out, rank):
    return json.loads((out / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """What each loop has trained, in one process and in each of two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    alone("loops.py", one)
    finished = torchrun(2, "loops.py", two)
    assert finished.returncode == 0, finished.stderr
    return of_rank(one, 0), [of_rank(two, rank) for rank in range(2)]


@pytest.mark.parametrize(
    "loop", ["skipping", "skipping_fetched", "repeating", "evaluating", "breaking_off"]
)
def test_a_loop_gives_what_it_gives_in_one_process(loops, loop):
    expected, found = loops
    assert [ranks[loop] for ranks in found] == [expected[loop]] * 2


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (
            "one_skips",
            r"PeerError: rank \d is at step 3 \(epoch 0, batch \d, .*, but rank \d .* is at step 3 "
            r"\(epoch 0, batch \d",
        ),
        (
            "one_begins_behind",
            r"InputError: the processes disagree about the data: the next batch is \[0, 3\] on "
            r"rank 1 .*, but \[0, 2\] on rank 0",
        ),
    ],
)
def test_processes_at_different_places_in_the_data_are_refused(tmp_path, call, pattern):
    torchrun(2, "loops.py", tmp_path, call)
    for rank in range(2):
        seconds, text = of_rank(tmp_path, rank)
        assert re.search(pattern, text)
        assert seconds < 8
