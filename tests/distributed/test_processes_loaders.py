"""Loaders that are not evenstep's, in several processes: the same bits; parts where that works."""

import importlib.util
import itertools
import json
import re

import pytest

from evenstep.data.fetching import COMPARED
from launched import alone, launched
from loading import EXAMPLES, OWN
from marks import slow

PARTS = ["shuffled", "quiet", "augmented", "in lists", "weighted", "fork"]
WHOLE = ["collate_fn", "stream", "stream fork", "list", "generators", "own state"]
OPTIONAL = {"torchdata": ["torchdata stream"], "datasets": ["datasets", "datasets stream shuffled"]}


def of_rank(out, rank):
    return json.loads((out / f"{rank}.json").read_text())


def trained(folder, kinds, processes):
    folder.mkdir()
    if processes == 1:
        finished = alone("loaders.py", folder, *kinds)
    else:
        finished = launched(processes, "loaders.py", folder, *kinds)
    assert finished.returncode == 0, finished.stderr
    return [of_rank(folder, rank) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_all_loaders_give_what_they_give_in_one_process(tmp_path, processes):
    kinds = [*PARTS, *WHOLE, *OWN]
    for name, more in OPTIONAL.items():
        kinds += more if importlib.util.find_spec(name) else []
    (expected,) = trained(tmp_path / "one", kinds, 1)
    for found in trained(tmp_path / "several", kinds, processes):
        for kind in kinds:
            assert found[kind]["fingerprint"] == expected[kind]["fingerprint"], kind
    assert len({expected[kind]["fingerprint"] for kind in OWN}) == 1


def test_each_process_fetches_its_part_where_it_can(tmp_path):
    (expected,) = trained(tmp_path / "one", ["quiet", "augmented", "collate_fn"], 1)
    found = trained(tmp_path / "two", ["quiet", "augmented", "collate_fn"], 2)
    for kind in ("quiet", "augmented", "collate_fn"):
        assert {one[kind]["fingerprint"] for one in found} == {expected[kind]["fingerprint"]}
    first = 2 * COMPARED  # fetched twice, in every process
    parts = [one["quiet"]["fetched"][first:] for one in found]
    assert sorted(itertools.chain(*parts)) == sorted(expected["quiet"]["fetched"][first:])
    assert all(len(part) < 0.6 * EXAMPLES for part in parts)
    (line,) = {line for line in found[0]["lines"] if "every process loads whole batches" in line}
    assert "its collate_fn may pad or mix the examples of a whole batch" in line
    assert not [line for line in found[1]["lines"] if "every process loads" in line]


def test_a_loop_may_ask_for_whole_batches_to_draw_numbers_for_every_example(tmp_path):
    (expected,) = trained(tmp_path / "one", ["whole"], 1)
    found = trained(tmp_path / "two", ["whole"], 2)
    assert {one["fingerprint"] for one in found} == {expected["fingerprint"]}
    assert not [line for one in found for line in one["lines"] if "whole batches" in line]


DATA_SETS = ["listed, collate_fn", "listed, workers", "changed, own"]
DATA_SETS += [slow(kind) for kind in ("listed", "listed, own", "changed")]


@pytest.mark.parametrize("kind", DATA_SETS)
def test_processes_with_other_data_sets_of_one_length_are_refused(tmp_path, kind):
    """As `os.listdir` gives two machines."""
    launched(2, "loaders.py", tmp_path, "apart", kind)
    for text, steps_done in (of_rank(tmp_path, rank) for rank in range(2)):
        assert re.match(
            r"InputError: the processes disagree about the data: a digest of some examples is \d+ "
            r"on rank 1 \(\S+\), but \d+ on rank 0",
            text,
        )
        assert steps_done == 0


def test_a_data_set_that_nobody_can_seed_is_not_taken_for_another_one(tmp_path):
    launched(2, "loaders.py", tmp_path, "apart", "odd")
    for text, steps_done in (of_rank(tmp_path, rank) for rank in range(2)):
        assert text.startswith("InputError: Odd gave other examples when")
        assert steps_done == 0


DISAGREE = "InputError: the processes disagree about the data: "


@pytest.mark.parametrize(
    ("kind", "pattern", "steps"),
    [
        ("another order", f"{DISAGREE}a digest of (the|some)", 0),
        slow("unseeded", r"InputError: the sampler .*gave two orders", 0),
        slow("another length", r"InputError: .* its length is 11 on rank 1 .*, but 12 on rank", 0),
        slow("another kind", r"InputError: .* is DataLoader on rank 1 .*, but list on rank 0", 0),
        slow("other batches", r"ContractError: in step 0 rank 1 .* was given a different batch", 0),
        slow(
            "ends early",
            r"PeerError: rank \d \(on \S+\) is in (step 4|epoch), but rank \d \(on \S+\) is in "
            r"(step 4|epoch): every process must call epoch",
            4,
        ),
    ],
    ids=str,
)
def test_processes_with_different_loaders_are_refused(tmp_path, kind, pattern, steps):
    launched(2, "loaders.py", tmp_path, "apart", kind)
    for text, steps_done in (of_rank(tmp_path, rank) for rank in range(2)):
        assert re.match(pattern, text)
        assert "\n" not in text
        assert steps_done == steps
