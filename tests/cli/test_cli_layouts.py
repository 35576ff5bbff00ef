"""`evenstep train --stages`, `--owners`: one fingerprint, and one line for each error."""

import pytest
from test_cli_processes import start

from commands import MLP, complaint, steps_kept, trained
from evenstep.cli.training.record import TrainRecord

SHORT = (*MLP, "--steps", 4)
LAYOUTS = {
    "two stages of equal bytes": ("--devices", 2, "--stages", "balanced"),
    "stages of equal times": ("--devices", 2, "--stages", "balanced:time"),
    "two stages, twice": ("--devices", 4, "--stages", "balanced:2"),
    "named stages": ("--devices", 2, "--stages", "0=0,3=1"),
    "owners": ("--devices", "cpu:0:own,cpu:1:own", "--owners"),
}


@pytest.fixture(scope="module")
def undivided():
    return trained(*SHORT, "--devices", 1).fingerprint


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_the_result(layout, undivided):
    assert trained(*SHORT, *LAYOUTS[layout]).fingerprint == undivided


def test_owners_save_and_the_training_resumes_without_them(tmp_path, monkeypatch, undivided):
    monkeypatch.chdir(tmp_path)
    keep = ("--checkpoint-dir", "kept", "--checkpoint-every", 2)
    trained(*MLP, "--steps", 3, *LAYOUTS["owners"], *keep)
    assert steps_kept() == [2, 3]
    assert trained("--resume", *keep, "--steps", 4, "--devices", 1).fingerprint == undivided


@pytest.mark.slow
def test_owners_and_stages_in_two_processes(tmp_path, undivided):
    file, keep = tmp_path / "record.json", ("--checkpoint-dir", tmp_path / "kept")
    options = ("--processes", 2, "--devices", 2, "--owners", "--stages", "balanced")
    start("train", *MLP, "--steps", 3, *options, *keep).communicate()
    ended = start("train", "--resume", "--steps", 4, *options, *keep, "--json", file)
    ended.communicate()
    assert ended.returncode == 0
    assert TrainRecord.from_json(file.read_text()).fingerprint == undivided


ERRORS = {
    ("--stages", "halves"): "'halves' is none of balanced, balanced:2, balanced:time, ",
    ("--stages", "balanced:0"): "'balanced:0' is none of balanced, ",
    ("--stages", "0=x"): "modules and their stages, such as features=0,classifier=1",
    ("--stages", "0=0,0=1"): "'0=0,0=1' is none of",
    ("--stages", "=1"): "'=1' is none of",
}


@pytest.mark.parametrize("options", ERRORS, ids="".join)
def test_what_is_no_layout_gets_a_line(options):
    assert ERRORS[options] in complaint("train", *options, code=2)


def test_a_module_that_the_model_does_not_have_gets_a_line():
    assert "the module 'body'" in complaint("train", *MLP, "--stages", "body=0", code=2)
