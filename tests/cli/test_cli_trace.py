"""`train --in-flight`, `--trace` and the closing table, and what `explain` makes of the trace."""

import json
import re
import sys

import pytest

from commands import MLP, complaint, run, steps_kept, trained

ROW = re.compile(
    r"^(?P<device>\S+) +(\d+)% +(\d+)% +(\d+)% +(\d+)% +(\d+)% +(?P<shards>\d+) +(?P<stolen>\d+)$",
    re.MULTILINE,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_steps_in_flight_change_nothing_but_time():
    one = trained(*MLP, "--steps", 8, "--devices", 1)
    for in_flight, devices in ((2, 1), (2, 2), (3, "cpu:0,cpu:1:own")):
        other = trained(*MLP, "--steps", 8, "--in-flight", in_flight, "--devices", devices)
        assert other.fingerprint == one.fingerprint
        assert other.train_loss == one.train_loss
        assert other.test_accuracy == one.test_accuracy


def test_checkpoints_between_steps_in_flight_are_those_of_single_steps():
    options = (*MLP, "--steps", 11, "--checkpoint-every", 4, "--devices", 2)
    one = trained(*options, "--checkpoint-dir", "one")
    two = trained(*options, "--checkpoint-dir", "two", "--in-flight", 2)
    assert two.fingerprint == one.fingerprint
    assert steps_kept("one") == steps_kept("two") == [4, 8, 11]
    goes_on = ("--resume", "--checkpoint-dir", "two", "--steps", 15, "--in-flight", 2)
    assert trained(*goes_on).fingerprint == trained(*MLP, "--steps", 15).fingerprint


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_closing_table_accounts_for_every_device(in_flight):
    output = run("train", *MLP, "--steps", 12, "--devices", 3, "--in-flight", in_flight).stdout
    rows = {row["device"]: row for row in ROW.finditer(output)}
    assert list(rows) == ["cpu:0", "cpu:1", "cpu:2", "all"]
    for row in rows.values():
        assert sum(map(int, row.groups()[1:6])) == 100
    shards = [int(rows[f"cpu:{number}"]["shards"]) for number in range(3)]
    assert sum(shards) == int(rows["all"]["shards"]) == 12 * 8


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_trace_has_every_shard_and_is_explained(folder, in_flight):
    options = ("--steps", 12, "--devices", 2, "--in-flight", in_flight, "--trace", "run.trace")
    closing = [row.groups() for row in ROW.finditer(run("train", *MLP, *options).stdout)]
    events = json.loads((folder / "run.trace").read_text())["traceEvents"]
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert rows[:4] == ["cpu:0", "cpu:1", "copy cpu:0", "copy cpu:1"]
    assert set(rows[4:]) == {"front end", "steps"}
    shards = [(e["args"]["step"], e["args"]["shard"]) for e in events if e.get("cat") == "compute"]
    assert sorted(shards) == [(step, shard) for step in range(12) for shard in range(8)]
    copies = [event for event in events if event.get("cat") == "copy"]
    assert {e["args"]["step"] for e in copies} == (set() if in_flight == 1 else set(range(12)))
    output = run("explain", "run.trace").stdout
    explained = [row.groups() for row in ROW.finditer(output)]
    assert [row[-2:] for row in explained] == [row[-2:] for row in closing]  # shards, stolen
    for ours, theirs in zip(explained, closing, strict=True):
        for share, other in zip(ours[1:6], theirs[1:6], strict=True):
            assert abs(int(share) - int(other)) <= 2
    assert len(output.splitlines()[-1].split()) > 5  # a finding, in words


def test_a_stopped_run_leaves_its_trace(folder):
    complaint(
        *("train", "--model", "cli_models:Interrupted", "--devices", 1, "--trace", "run.trace"),
        code=130,
    )
    assert run("explain", "run.trace").stdout.startswith("6 steps in ")
