"""The kit for a machine with a GPU, on the emulated accelerator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarking  # noqa: F401 - finds the folder benchmarks
import emu
from gpu.tables import tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(bool(emu.missing()), reason=emu.missing())


def measured(out, *options):
    """Run the kit with small sizes; return what it prints, its status, and the runs by part."""
    command = [sys.executable, "-m", "gpu", "--device", "emu", "--quick", "--out", out, *options]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, cwd=BENCHMARKS
    )
    document = json.loads(out.read_text())
    return done, document, {run["part"]: run for run in document["runs"]}


@pytest.mark.slow
def test_what_must_hold_is_measured_and_written(tmp_path):
    done, document, runs = measured(tmp_path / "gpu.json", "--only", "sameness.lenet")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs.values()
    assert run["holds"]
    assert len(run["fingerprints"]) == 5
    assert document["device"] == "emu"
    assert document["machine"]["git_revision"]


def test_a_part_without_time_is_named(tmp_path):
    done, _, runs = measured(tmp_path / "gpu.json", "--only", "waits", "--minutes", "0")
    assert done.returncode == 1
    assert runs["waits"]["error"] == "no time was left"


@pytest.mark.exhaustive  # minutes; `make gpu DEVICE=emu` runs them, too
def test_every_part_runs(tmp_path):
    done, document, runs = measured(tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any("error" in run for run in runs.values())
    found = tables(document)
    assert len(found["speed"].rows) == 5 * sum(name.startswith("speed") for name in runs) + 5
    for table in found.values():
        assert table.markdown()
