"""`evenstep train --log-dir`: the command's own numbers, without an effect on the result."""

import csv
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from test_cli_process import start
from test_cli_processes import wait_for_step

from commands import EPOCH_STEPS, MLP, complaint, run, trained

pytest.importorskip("tensorboard", reason="pip install evenstep[tensorboard]")


def rows(folder):
    with Path(folder, "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in shown.Scalars(tag)]


def results(folder):
    """Return what of a log does not depend on time, from both files."""
    columns = ("step", "epoch", "loss", "lr", "grad_norm", "accuracy")
    table = [[row[name] for name in columns] for row in rows(folder)]
    return table, events(folder, "loss"), events(folder, "accuracy")


def test_a_log_has_the_runs_numbers_and_no_effect_on_it(tmp_path):
    plain = trained(*MLP, "--epochs", 2, "--devices", 1)
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        record = trained(
            *MLP, "--epochs", 2, "--devices", devices, "--in-flight", devices, "--log-dir", folder
        )
        assert record.fingerprint_2 == plain.fingerprint_2
        assert record.train_loss == plain.train_loss
        table = rows(folder)
        assert [int(row["step"]) for row in table] == list(range(1, 2 * EPOCH_STEPS + 1))
        assert float(table[-1]["accuracy"]) == record.test_accuracy
        tested = [int(row["step"]) for row in table if row["accuracy"]]
        assert tested == [EPOCH_STEPS, 2 * EPOCH_STEPS]
        assert events(folder, "accuracy")[-1] == (12, float(np.float32(record.test_accuracy)))
        assert [float(row["loss"]) for row in table] == pytest.approx(
            [loss for _, loss in events(folder, "loss")]
        )
        assert all(0 <= float(row["busy/cpu:0"]) <= 1 for row in table)
    assert results(tmp_path / "1") == results(tmp_path / "2")


def test_a_resumed_run_goes_on_in_its_log(tmp_path):
    kept = ("--checkpoint-dir", tmp_path / "kept")
    trained(*MLP, "--epochs", 3, "--log-dir", tmp_path / "whole")
    trained(*MLP, "--steps", 8, *kept, "--log-dir", tmp_path / "log", "--devices", 2)
    line = complaint("train", *MLP, "--log-dir", tmp_path / "log", code=2)
    assert "already has the log of a training, up to step 8" in line
    again = ("--resume", *kept, "--log-dir", tmp_path / "log", "--devices", 1)
    trained(*again, "--epochs", 3)
    whole, resumed = (rows(tmp_path / name) for name in ("whole", "log"))
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    assert events(tmp_path / "log", "loss") == events(tmp_path / "whole", "loss")
    run("train", *again)  # nothing is left to train
    assert rows(tmp_path / "log") == resumed


@pytest.mark.parametrize("name", ["", " ", "file", "file/x", "x" * 300, "\udcff"])
def test_what_is_no_folder_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    line = complaint("train", "--log-dir", name, code=2)
    assert line.startswith("evenstep: got --log-dir ")
    assert line.endswith(": expected a folder, or a new one in a folder")
    assert os.listdir() == ["file"]


def test_a_folder_that_cant_be_written_is_told_before_training():
    line = complaint("train", *MLP, "--log-dir", "/proc/here", code=1)
    assert line.startswith("evenstep: the log in '/proc/here' could not be written (")
    assert "nothing was trained" in line


@pytest.mark.slow
def test_after_a_kill_the_log_has_no_gap_and_no_step_twice(tmp_path):
    kept, log = tmp_path / "kept", tmp_path / "log"
    options = ("--checkpoint-dir", kept, "--checkpoint-every", 40, "--log-dir", log)
    process = start("train", *MLP, "--steps", 10**6, *options, "--devices", 2)
    wait_for_step(kept, 120, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(rows(log)) >= 120
    steps = len(rows(log)) + 10
    trained("--resume", *options, "--steps", steps, "--devices", 1)
    trained(*MLP, "--steps", steps, "--log-dir", tmp_path / "whole")
    table, losses, accuracies = results(log)
    assert [row[0] for row in table] == [str(step) for step in range(1, steps + 1)]
    assert (table, losses, accuracies) == results(tmp_path / "whole")


@pytest.mark.slow
def test_of_several_processes_the_first_one_logs(tmp_path):
    options = (*MLP, "--epochs", 2, "--log-dir")
    process = start("train", "--processes", 2, "--devices", 1, *options, tmp_path / "two")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    trained(*options, tmp_path / "one")
    assert results(tmp_path / "two") == results(tmp_path / "one")
