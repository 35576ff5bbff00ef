"""Windows and macOS, as far as Linux can show them: what they lack is taken away."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.checkpoint import files as checkpoint_files
from evenstep.devices import malloc
from lacking import RESERVED

ROOT = Path(__file__).parents[1]
JOB = ROOT / "tests" / "support" / "jobs" / "lacking_system.py"

sys.path.insert(0, str(ROOT / "benchmarks"))
from readme_program import program  # noqa: E402


def first_hour(system, folder):
    """Return what `jobs/lacking_system.py` prints: fingerprints, and lines of errors."""
    (folder / "readme.py").write_text(program(1), encoding="utf-8")
    given = [sys.executable, "-X", "warn_default_encoding", JOB, system, folder]
    done = subprocess.run(given, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def linux(tmp_path_factory):
    found = first_hour("linux", tmp_path_factory.mktemp("linux"))
    assert re.fullmatch("[0-9a-f]{64}", found["readme"])
    assert found["resumed"] == found["straight"] != found["first"]
    assert found["verify"] == found["doctor"] == found["explain"] == [0, "", ""]
    return found


ELSEWHERE = (
    "evenstep: evenstep bench and evenstep reproduce measure memory and page faults as Linux"
)
LACKING = {
    "darwin": {"bench": ELSEWHERE, "reproduce": ELSEWHERE},
    "win32": {
        "bench": ELSEWHERE,
        "reproduce": ELSEWHERE,
        "processes": "evenstep: got --processes on Windows",
        "portable": "evenstep: portable arithmetic is compiled on Linux and macOS only",
    },
}


@pytest.mark.timeout(1700)
@pytest.mark.xdist_group("other systems")
@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_what_a_system_lacks_changes_no_result(linux, system, tmp_path):
    found = first_hour(system, tmp_path)
    code, facts, errors = found.pop("devices")
    assert (code, errors) == (0, "")
    assert "affinity unknown" in facts
    assert "memory     unknown" in facts or system == "darwin"
    for name, line in LACKING[system].items():
        code, said = found.pop(name)
        assert code != 0
        assert said.startswith(line)
        assert said.count("\n") == 1
    assert found == {name: linux[name] for name in found}


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_worker_processes_that_are_spawned_change_no_result(tmp_path):
    """As they are by default on Windows and macOS."""
    lines = program(1).replace("shuffle=True", "shuffle=True, num_workers=2")
    assert "num_workers=2" in lines
    guarded = lines.replace("\n", "\n    ")
    spawned = f"""if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.set_start_method("spawn")
    {guarded}
"""
    printed = []
    for name, code in ("plain.py", program(1)), ("spawned.py", spawned):
        (tmp_path / name).write_text(code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, tmp_path / name], capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]


def test_no_process_is_ended_to_learn_whether_it_lives(tmp_path, monkeypatch):
    """On Windows, `os.kill` ends a process with any signal."""

    def kill(pid, number):
        raise AssertionError(f"process {pid} would have ended")

    left = tmp_path / f".step-00000001.writing-{checkpoint_files.platform.node()}-4321.{'0' * 16}"
    left.mkdir()
    assert checkpoint_files._HIDDEN.fullmatch(left.name)
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(sys, "platform", "win32")
    checkpoint_files._remove_leftovers(tmp_path)
    assert left.exists()


def test_a_program_without_a_library_of_its_own_keeps_malloc_as_it_is(monkeypatch):
    """Python may be linked statically against glibc."""

    def no_library(name):
        raise OSError(errno.ENOEXEC, "this program is static")

    monkeypatch.setattr(malloc.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(malloc.ctypes, "CDLL", no_library)
    with malloc.kept_memory():
        pass


def tracked(*options):
    """Return what `git ls-files` says of this checkout."""
    listed = ["git", "-C", str(ROOT), "ls-files", *options]
    done = subprocess.run(listed, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this copy of the project is no checkout")
    return done.stdout.splitlines()


def test_every_file_can_be_checked_out_on_every_system():
    devices = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
    names = tracked()
    assert "pyproject.toml" in names
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        assert not RESERVED & set(name)
        assert max(map(len, name.split("/"))) <= 100
        for part in name.split("/"):
            assert not devices.fullmatch(part)
            assert not part.endswith((".", " "))


def test_lines_end_alike_everywhere():
    """Also in a checkout on Windows: fingerprints and digests of files depend on it."""
    ends = [line.split() for line in tracked("--eol")]
    assert {found[0] for found in ends} <= {"i/lf", "i/-text", "i/none"}
    assert {found[2] for found in ends if found[0] == "i/lf"} == {"attr/text=auto"}
