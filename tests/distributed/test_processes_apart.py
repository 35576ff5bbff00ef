"""Processes that differ in what nobody looks at: containers, processors, settings."""

import json
import os
import subprocess

import pytest

from launched import alone, apart

OWN_MEMORY = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
"""A command that gives the command after it a /dev/shm of its own, as a container has."""


def found(tmp_path, *kinds, **differences):
    """Return for each process how each kind of `jobs/apart.py` has ended."""
    ends = apart("apart.py", tmp_path, *kinds, **differences)
    assert [code for code, *_ in ends] == [0] * len(ends), ends
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(ends))]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """How one process alone trains."""
    out = tmp_path_factory.mktemp("alone")
    finished = alone("apart.py", out, "plain")
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / "0.json").read_text())["plain"]


def may_have_own_memory():
    command = [*OWN_MEMORY, "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_have_own_memory(), reason="unshare -m and mount need root")
def test_processes_with_a_dev_shm_each_train_one_model(one_process, tmp_path):
    ends = found(tmp_path, "plain", within=[OWN_MEMORY, OWN_MEMORY])
    assert [end["plain"]["error"] for end in ends] == [None, None]
    assert {end["plain"]["fingerprint"] for end in ends} == {one_process["fingerprint"]}


@pytest.mark.slow
def test_processes_killed_after_the_first_step_leave_no_file(tmp_path):
    before = {*os.listdir("/dev/shm")}
    ends = apart("apart.py", tmp_path, "killed")
    assert [code for code, *_ in ends] == [-9, -9]
    assert {*os.listdir("/dev/shm")} <= before
