"""`evenstep train` fixes how Python hashes strings, in every process that it starts."""

import json
import os
import subprocess
import sys

import pytest

from evenstep.checkpoint.files import read_checkpoint

FRESH = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
TRAIN = ("train", "--model", "cli_models:Hashing", "--steps", "2", "--json", "-")


def fingerprint(*options, folder, **variables):
    """Train in a fresh process that finds the models of `tests/support`."""
    ended = subprocess.run(
        [sys.executable, "-m", "evenstep", *TRAIN, "--checkpoint-dir", folder, *options],
        env={**FRESH, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)["fingerprint"]


def test_two_trainings_hash_alike(tmp_path):
    found = {fingerprint(folder=tmp_path / name) for name in ("one", "two")}
    assert len(found) == 1
    assert read_checkpoint(tmp_path / "one")["hash_seed"] == "0"
    assert found != {fingerprint(folder=tmp_path / "seven", PYTHONHASHSEED="7")}
    assert read_checkpoint(tmp_path / "seven")["hash_seed"] == "7"


@pytest.mark.slow
def test_the_processes_of_a_launcher_hash_alike(tmp_path):
    one = fingerprint("--devices", "1", folder=tmp_path / "one")
    assert fingerprint("--devices", "1", "--processes", "2", folder=tmp_path / "two") == one


def test_a_program_that_calls_the_command_is_not_started_again(tmp_path):
    code = "print('begun by hand'); from evenstep.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "--help"]
    ended = subprocess.run(command, env=FRESH, capture_output=True, text=True, check=True)
    assert ended.stdout.count("begun by hand") == 1
