"""`evenstep bench`: tables, files and errors; a slow test runs the peers."""

import builtins
import json
import os
import re

import pytest

from commands import complaint, run
from evenstep.bench import fresh
from evenstep.cli.bench import busy_note, fastest_of
from evenstep.cli.machine.load import busy_cores, core_ticks, cores_used_by_others

FAST = ("--model", "mlp", "--batch-size", 32, "--rounds", 1, "--steps", 2)


def rows(output):
    """Return the cells of each line that begins a row of a table."""
    return [re.split(r" {2,}", line) for line in output.splitlines() if line.strip()]


@pytest.mark.slow
def test_scaling_says_how_fast_and_where_the_time_went(tmp_path):
    file, picture = tmp_path / "s.json", tmp_path / "s.png"
    result = run("bench", "scaling", *FAST, "--devices", "1,2", "--json", file, "--plot", picture)
    titles = [cells for cells in rows(result.stdout) if len(cells) == 1]
    assert titles == [["the same batch:"], ["a batch that grows:"]]
    tables = [cells for cells in rows(result.stdout) if len(cells) == 11]
    head, one, two = tables[:3]
    assert head[4:7] == ["speed-up", "efficiency", "busy"]
    assert (one[0], one[1], one[4], one[5]) == ("1", "32", "1.00", "100%")
    assert (two[0], two[1]) == ("2", "32")
    assert tables[-1][:2] == ["2", "64"]
    for cells in (one, two, tables[-1]):
        assert sum(int(cell.rstrip("%")) for cell in cells[6:]) == 100
    document = json.loads(file.read_text())
    assert len(document["runs"]) == 3
    assert document["machine"]["usable_cores"] > 0
    speed = next(r["examples_per_s"] for r in document["runs"] if ".n64" in r["contender"])
    assert tables[-1][2] == f"{speed:,.1f}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_peers_stand_in_the_order_of_their_speed(monkeypatch):
    found = {"ddp": 50.0, "evenstep": 80.0, "processes": 60.0}

    def run_module(module, job, **_):
        speed = 90.0 if job.get("hybridize") else found.get(job["library"], 40.0)
        return {"examples_per_s": speed, "seconds": 1.0}

    monkeypatch.setattr(fresh, "run_module", run_module)
    result = run("bench", "peers", *FAST, "--workers", 2)
    _, first, *equal, third, _, _, _, _, _, last, told = rows(result.stdout)
    assert first[0] == "evenstep, 2 devices, V = 8, hybridized"
    devices = "evenstep, 2 devices, V = 8"
    assert {one[0] for one in equal} == {devices, f"{devices}, channels-last"}
    assert {tuple(one[1:]) for one in equal} == {("80.0", "80.0 to 80.0", "1.00")}
    assert third == ["evenstep, 2 processes, V = 8", "60.0", "60.0 to 60.0", "0.75"]
    assert last[1:] == ["40.0", "40.0 to 40.0", "0.50"]
    assert told[0].startswith("evenstep is the fastest here: DDP, 2 processes, contiguous has 0.56")


def measured(**speeds):
    """Return the results of contenders, by their library: their speeds in the rounds."""
    return {
        "contenders": [{"key": one, "library": one, "label": one.upper()} for one in speeds],
        "runs": [
            {"contender": one, "round": number, "examples_per_s": speed}
            for one, rounds in speeds.items()
            for number, speed in enumerate(rounds)
        ],
    }


def test_a_peer_that_is_faster_in_every_round_is_named():
    told = fastest_of(measured(plain=[1, 1, 1], ddp=[15, 30, 24], evenstep=[10, 20, 20]))
    assert told.startswith(
        "DDP trains this model faster, 1.50 times (1.20 to 1.50) as fast as EVEN"
    )


def test_a_peer_that_is_faster_in_some_rounds_is_about_as_fast():
    told = fastest_of(measured(ddp=[11, 9, 11], evenstep=[10, 10, 10]))
    assert told == "DDP is about as fast: 1.10 times (0.90 to 1.10) the speed of EVENSTEP"


@pytest.mark.parametrize("ours", ["evenstep", "processes", "even_trainer"])
def test_every_way_to_train_with_evenstep_counts_as_its_own(ours):
    speeds = {"evenstep": [1, 1], "processes": [1, 1], "even_trainer": [1, 1], ours: [20, 20]}
    told = fastest_of(measured(fabric=[10, 10], ddp=[5, 5], **speeds))
    assert told.startswith("evenstep is the fastest here: FABRIC has 0.50 times (0.50 to 0.50)")
    assert told.endswith(f" the speed of {ours.upper()}")


def test_what_was_left_out_is_not_compared():
    told = fastest_of(measured(accelerate=[], plain=[5], evenstep=[10], processes=[]))
    assert told.startswith("evenstep is the fastest here: PLAIN has 0.50")


def test_numbers_of_shards_are_compared_with_one(monkeypatch):
    def run_module(module, job, **_):
        assert job["workers"] == 2
        return {"examples_per_s": 100.0 - 5 * job["shards"], "seconds": 1.0}

    monkeypatch.setattr(fresh, "run_module", run_module)
    result = run("bench", "shards", *FAST, "--workers", 2, "--numbers", "12,2", "--shards", 4)
    head, two, four, twelve = rows(result.stdout)
    assert head[-1] == "over V = 4"
    assert two == ["2", "16", "90.0", "90.0 to 90.0", "1.12"]
    assert four == ["4", "8", "80.0", "80.0 to 80.0", "1.00"]
    assert twelve == ["12", "3", "40.0", "40.0 to 40.0", "0.50"]


def test_a_quick_measurement_is_short_and_says_how_long_it_takes(monkeypatch):
    jobs = []

    def run_module(module, job, **_):
        jobs.append(job)
        return {"examples_per_s": 320.0, "seconds": 1.0}

    monkeypatch.setattr(fresh, "run_module", run_module)
    options = ("--model", "mlp", "--batch-size", 32, "--workers", 2, "--numbers", "2")
    lines = run("bench", "shards", *options, "--quick").stderr.splitlines()
    shown = [line for line in lines if " left  " in line]
    assert [line.partition("  ")[0] for line in shown] == ["round 1 of 2"] * 2 + [
        "round 2 of 2"
    ] * 2
    assert shown[-1].split("  ")[1] == "0:00:00 left"
    assert "ratios are taken within each round" in lines[-1]
    second = {job["steps"] for job in jobs[-4:]}
    lines = run("bench", "shards", *options, "--quick", "--seconds", 4, "--rounds", 1).stderr
    assert "round 1 of 1" in lines
    assert {4 * steps for steps in second} == {job["steps"] for job in jobs[-2:]}


def test_a_busy_machine_is_noted():
    assert busy_note(None, 4) == busy_note(0.1, 4) == ""
    assert busy_note(1.26, 4).startswith("other programs use 1.3 of 4 cores")


STAT = """cpu  30 0 30 140 0 0 0 0 0 0
cpu0 {} 0 10 {} 20 1 2 3 7 0
cpu1 0 0 0 {} 0 0 0 0 0 0
intr 1 2 3
"""


def test_busy_cores_are_those_that_were_not_idle():
    before, after = (core_ticks(STAT.format(*ticks)) for ticks in ((100, 50, 10), (130, 60, 110)))
    assert before[0] == (100 + 10 + 1 + 2 + 3, 100 + 10 + 50 + 20 + 1 + 2 + 3)
    assert busy_cores(before, after, {0, 1}) == 0.75
    assert busy_cores(before, after, {1}) == 0
    assert busy_cores(before, after, {0, 9}) == 0.75


def test_the_load_of_this_machine_is_some_of_its_cores():
    used = cores_used_by_others(0.05)
    assert used is None or 0 <= used <= len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_all_peers_do_the_same_work(tmp_path):
    file = tmp_path / "p.json"
    run("bench", "peers", *FAST, "--workers", 2, "--json", file)
    document = json.loads(file.read_text())
    assert {run["contender"].split(".")[1] for run in document["runs"]} == {
        *("plain", "ddp", "accelerate", "fabric", "evenstep", "processes")
    }
    moved = [run["weights_moved"] for run in document["runs"]]
    assert max(moved) == pytest.approx(min(moved), rel=1e-4)
    assert moved[0] > 0


def test_a_peer_that_is_not_installed_is_named_and_left_out(monkeypatch):
    monkeypatch.setattr(fresh, "run_module", lambda *_, **__: {"examples_per_s": 1.0, "seconds": 1})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "acc" in name else name)
    result = run("bench", "peers", *FAST, "--workers", 2)
    assert "left out: Accelerate, 2 processes, contiguous (accelerate is not" in result.stderr
    assert "Accelerate" not in result.stdout
    assert "Fabric" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("scaling", "--devices", "2,1"), "the least first"),
        (("scaling", "--devices", "1"), "at least two"),
        (("scaling", "--devices", "1,x"), "whole numbers with commas"),
        (("scaling", "--shape", "28,0"), "whole numbers with commas"),
        (("scaling", "--model", "alexnet"), "choose lenet, resnet18, mlp"),
        (("scaling", "--plot", "no/such/folder/x.png"), "expected a file in an existing folder"),
        (("shards", "--numbers", "2,33", "--batch-size", 32), "a batch has at most 32 shards"),
        (("shards", "--numbers", "2,x"), "got --numbers '2,x': expected whole numbers"),
        (("peers", "--batch-size", 33, "--workers", 2), "a multiple of the number of workers"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(arguments, part, monkeypatch):
    monkeypatch.setattr(fresh, "run_module", None)
    assert part in complaint("bench", *arguments, code=2)


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch):
    real = builtins.__import__

    def without(name, *more, **others):
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *more, **others)

    monkeypatch.setattr(fresh, "run_module", None)
    monkeypatch.setattr(builtins, "__import__", without)
    line = complaint("bench", "scaling", "--plot", "x.png", code=2)
    assert "pip install 'evenstep[bench]'" in line


@pytest.mark.slow
def test_a_model_that_fails_is_one_line():
    line = complaint("bench", "scaling", *FAST, "--shape", "3,5", "--devices", "1,2", code=1)
    assert re.match(r"evenstep: a run of mlp failed: .*mat1 and mat2 shapes", line)
