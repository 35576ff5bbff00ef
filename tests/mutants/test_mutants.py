"""The list of planted faults fits the code, and all of them were caught when `run.py` ran last."""

import collections
import json
from pathlib import Path

from mutants import KINDS, MUTANTS

HERE = Path(__file__).parent
TESTS = HERE.parent
SOURCE = TESTS.parent / "src" / "evenstep"


def test_there_are_enough_of_each_kind_with_names_of_their_own():
    of_kind = collections.Counter(mutant.kind for mutant in MUTANTS)
    assert of_kind.keys() == {*KINDS}
    assert min(of_kind.values()) >= 8
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


def test_a_fault_has_one_place_in_its_file_which_stays_valid():
    for mutant in MUTANTS:
        text = (SOURCE / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant
        assert mutant.new != mutant.old, mutant
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_the_tests_of_a_fault_exist():
    for mutant in MUTANTS:
        assert mutant.tests, mutant
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (TESTS / file).read_text(encoding="utf-8")
            assert not name or f"\ndef {name}(" in text, mutant


def test_all_faults_were_caught():
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    found = [(row["name"], row["kind"], row["file"]) for row in results["mutants"]]
    assert found == [(mutant.name, mutant.kind, mutant.file) for mutant in MUTANTS]
    assert [row["name"] for row in results["mutants"] if not row["caught"]] == []
