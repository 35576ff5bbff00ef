"""`evenstep train` fixes how Python hashes strings, in every process that it starts."""

import os
import re
import subprocess
import sys

import pytest

import cli_models
from commands import trained
from evenstep.checkpoint.files import read_checkpoint

FRESH = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
TRAIN = ("train", "--model", "cli_models:Hashing", "--steps", "2")


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
    return re.search(r"^fingerprint +(\w{64})$", ended.stdout, re.MULTILINE)[1]


def fingerprint_of(seed, monkeypatch):
    """Train in this process, with the hash that a process with this seed computes."""
    command = [sys.executable, "-c", "print(hash('a name'))"]
    environment = {**FRESH, "PYTHONHASHSEED": seed}
    ended = subprocess.run(command, env=environment, capture_output=True, check=True)
    monkeypatch.setattr(cli_models, "hash", lambda text: int(ended.stdout), raising=False)
    return trained(*TRAIN[1:]).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "seed"),
    [pytest.param({}, "0", id="fixed"), pytest.param({"PYTHONHASHSEED": "7"}, "7", id="given")],
)
def test_strings_are_hashed_with_seed_0_or_that_of_the_user(tmp_path, monkeypatch, variables, seed):
    found = fingerprint(folder=tmp_path, **variables)
    assert found == fingerprint_of(seed, monkeypatch)
    assert read_checkpoint(tmp_path)["hash_seed"] == seed


@pytest.mark.slow
def test_the_processes_of_a_launcher_hash_alike(tmp_path):
    one = fingerprint("--devices", "1", folder=tmp_path / "one")
    assert fingerprint("--devices", "1", "--processes", "2", folder=tmp_path / "two") == one


def test_a_program_that_calls_the_command_is_not_started_again(tmp_path):
    code = "print('begun by hand'); from evenstep.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "--help"]
    ended = subprocess.run(command, env=FRESH, capture_output=True, text=True, check=True)
    assert ended.stdout.count("begun by hand") == 1
