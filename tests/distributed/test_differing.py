"""Processes that compute differently are refused, whatever they compute on; others are not."""

import json
import re

import pytest

from launched import alone, apart, launched

BATCHES = ["whole", "loaded", "asked for", "divided", "single", "nested", "sparse", "in flight"]


def found_in(out, *cases, processes=2, **variables):
    """Return what ended each case, for each rank."""
    finished = launched(processes, "differing.py", out, *cases, **variables)
    assert finished.returncode == 0, finished.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ended each case in two processes."""
    return found_in(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The fingerprint of each case in a process alone."""
    out = tmp_path_factory.mktemp("alone")
    cases = [f"{name}, alike" for name in BATCHES]
    finished = alone("differing.py", out, *cases)
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / "0.json").read_text())


def assert_refused(found, case, *, after=0, first="total"):
    for one in found:
        assert one[case].startswith(f"ContractError after {after}: "), one[case]
        assert "rank 1" in one[case]
        assert "rank 0" in one[case]
        assert f"first that differs is its {first}" in one[case]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.thinned(3)
def test_a_model_that_depends_on_the_rank_is_refused_in_all_processes(found, name):
    assert_refused(found, f"{name}, by rank")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.thinned(3)
def test_processes_that_compute_the_same_have_the_bits_of_one(found, one_process, name):
    assert [one[f"{name}, alike"] for one in found] == [one_process[f"{name}, alike"]] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("mode", r"differ in model\.training \(True and False\), model.embedding.training"),
        ("number", r"differ in model\.factor \(0\.5 and 0\.50390625\): give every process"),
    ],
)
def test_the_attribute_that_differs_is_named(found, case, words):
    for one in found:
        assert one[case].startswith("ContractError after 0: ")
        assert re.search(words, one[case])


def test_what_differs_only_later_is_found_by_the_next_check(found):
    assert_refused(found, "later", after=3)
    assert_refused(found, "later, every 3", after=3)


def test_without_a_check_a_difference_goes_unnoticed(found, one_process):
    (ours, theirs) = (one["off"] for one in found)
    assert ours == theirs != one_process["whole, alike"]


def test_a_check_that_one_process_leaves_out_is_named(found):
    for one in found:
        assert "disagree about what is trained: check is off on rank 1" in one["off in one"]


def test_an_error_in_one_process_reaches_the_others(found):
    first, second = (one["failing"] for one in found)
    assert second == "RuntimeError after 0: rank 1 can't compute this shard"
    assert first.startswith("PeerError after 0: rank 1 (on ")
    assert "failed: RuntimeError: rank 1 can't compute this shard" in first


def test_an_error_in_all_processes_is_left_to_the_step(found):
    for one in found:
        assert "nobody can compute this" in one["never"]


@pytest.mark.parametrize(
    ("seeds", "is_refused"), [("12", True), pytest.param("11", False, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_the_order_of_a_set_of_strings_is_named(tmp_path, seeds, is_refused):
    variables = [{"PYTHONHASHSEED": seed} for seed in seeds]
    ended = apart("differing.py", tmp_path, "by set", variables=variables)
    assert [code for code, *_ in ended] == [0, 0], ended
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    if not is_refused:
        assert len({one["by set"] for one in found}) == 1
        assert "Error" not in found[0]["by set"]
        return
    assert_refused(found, "by set")
    assert all("hash strings differently" in one["by set"] for one in found)


@pytest.mark.slow
def test_of_three_processes_the_one_that_differs_is_named(tmp_path):
    found = found_in(tmp_path, "whole, by last", processes=3)
    for one in found:
        assert one["whole, by last"].startswith("ContractError after 0: ")
        assert "rank 2 (on " in one["whole, by last"]
        assert "rank 1 (on " not in one["whole, by last"]
