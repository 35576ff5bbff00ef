"""A log on disk holds a training's own numbers, each step once, also after a kill."""

import csv
import errno
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import evenstep
from evenstep.callbacks import Callback, RunLog
from evenstep.errors import InputError, SaveError
from marks import slow
from resuming import LOADER
from resuming import run as run_steps
from trainers import open_trainer, sgd
from zoo import build

pytest.importorskip("tensorboard", reason="pip install evenstep[tensorboard]")

STEPS = 7


def rows(folder):
    with Path(folder, "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder):
    """Return for each tag its (step, value) pairs, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


class Losses(Callback):
    def __init__(self):
        self.records = []

    def on_step(self, record):
        self.records.append(record)


def logged(folder, devices=1, steps=STEPS, **options):
    """Train with a log; return the records."""
    losses = Losses()
    callbacks = [RunLog(folder), losses]
    with open_trainer(
        build("convolution"), devices=devices, callbacks=callbacks, **options
    ) as trainer:
        run_steps(trainer, steps)
    return losses.records


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_files_have_the_records_numbers(in_flight, tmp_path):
    records = logged(tmp_path, devices=2, max_in_flight=in_flight)
    found, shown = rows(tmp_path), events(tmp_path)
    for name in ("step", "epoch", "loss", "lr", "examples_per_s"):
        assert [float(row[name]) for row in found] == [getattr(one, name) for one in records]
    norms = [one.outputs["grad_norm"] for one in records]
    assert [float(row["grad_norm"]) for row in found] == norms
    for device in ("cpu:0", "cpu:1"):
        shares = [one.busy[device] for one in records]
        assert [float(row[f"busy/{device}"]) for row in found] == shares
        in_32_bits = [float(np.float32(share)) for share in shares]
        assert [value for _, value in shown[f"busy/{device}"]] == in_32_bits
    assert shown["loss"] == [(one.step, float(np.float32(one.loss))) for one in records]
    assert shown["grad_norm"] == [
        (one.step, float(np.float32(norm))) for one, norm in zip(records, norms, strict=True)
    ]


def test_the_losses_are_the_same_on_any_devices(tmp_path):
    logged(tmp_path / "1", devices=1)
    logged(tmp_path / "2", devices=2)
    columns = ("step", "epoch", "loss", "lr", "grad_norm")
    one, two = ([[row[name] for name in columns] for row in rows(tmp_path / name)] for name in "12")
    assert one == two
    assert events(tmp_path / "1")["loss"] == events(tmp_path / "2")["loss"]


class Killed(Callback):
    """Copies the files as a kill would leave them after a step."""

    def __init__(self, folder, at):
        self._folder, self._at = folder, at

    def on_step(self, record):
        if record.step == self._at:
            shutil.copytree(self._folder, self._folder.with_name("killed"))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("saved_at", "killed_at"),
    [
        (3, 5),
        (4, 4),
        *(slow(100, 130), slow(117, 118)),
    ],
)
def test_after_a_kill_no_step_is_missing_or_there_twice(saved_at, killed_at, devices, tmp_path):
    end, folder = killed_at + 3, tmp_path / "run"
    callbacks = [RunLog(folder / "log"), Killed(folder, killed_at)]
    with open_trainer(build("convolution"), devices=1, callbacks=callbacks) as trainer:
        run_steps(trainer, saved_at - 1)
        run_steps(trainer, saved_at)
        trainer.save(folder)
        callbacks[0].add(saved_at, {"accuracy": 0.5})
        if killed_at > saved_at:
            run_steps(trainer, killed_at)
        else:
            shutil.copytree(folder, tmp_path / "killed", dirs_exist_ok=True)
        run_steps(trainer, end)
    model, killed = build("convolution"), tmp_path / "killed"
    with evenstep.Trainer.load(
        killed, model, sgd(model), nn.CrossEntropyLoss(), devices=devices,
        callbacks=[RunLog(killed / "log")],
    ) as trainer:  # fmt: skip
        run_steps(trainer, end)
    columns = ("step", "epoch", "loss", "lr", "grad_norm", "accuracy")
    whole, resumed = (
        [[row[name] for name in columns] for row in rows(one / "log")] for one in (folder, killed)
    )
    assert [row[0] for row in resumed] == [str(step) for step in range(1, end + 1)]
    assert resumed == whole
    for tag in ("loss", "grad_norm", "accuracy"):
        assert events(killed / "log")[tag] == events(folder / "log")[tag]


def test_a_log_of_another_training_is_refused_or_dropped_on_demand(tmp_path):
    first = logged(tmp_path)
    with pytest.raises(InputError, match="already has the log of a training, up to step 7"):
        logged(tmp_path)
    assert len(rows(tmp_path)) == STEPS
    with open_trainer(build("convolution"), callbacks=[RunLog(tmp_path, overwrite=True)]) as again:
        run_steps(again, 2)
    assert [float(row["loss"]) for row in rows(tmp_path)] == [one.loss for one in first[:2]]
    assert [step for step, _ in events(tmp_path)["loss"]] == [1, 2]


def test_two_trainers_have_a_log_each(tmp_path):
    log = RunLog(tmp_path)
    with open_trainer(build("convolution"), callbacks=[log]) as first:
        second = open_trainer(build("convolution"), callbacks=[log])
        with pytest.raises(InputError, match="is open already: give each trainer a RunLog"):
            second.__enter__()
        run_steps(first, 2)
    assert len(rows(tmp_path)) == 2


def test_a_trainer_that_is_opened_again_continues_its_log(tmp_path, monkeypatch):
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(9))  # 10 is sorted before it
    trainer = open_trainer(build("convolution"), callbacks=[RunLog(tmp_path)])
    for steps in (2, 5):
        with trainer:
            run_steps(trainer, steps)
    assert [row["step"] for row in rows(tmp_path)] == list("12345")
    assert [step for step, _ in events(tmp_path)["loss"]] == [1, 2, 3, 4, 5]


def test_numbers_among_the_outputs_are_logged_by_name(tmp_path):
    def objective(model, X, y):
        output = model(X)
        right = (output.argmax(1) == y).sum()
        loss = nn.functional.cross_entropy(output, y, reduction="sum")
        return loss, len(y), {"right": (right, len(y)), "loss": loss, "rows": output}

    model = build("convolution")
    with evenstep.Trainer(
        model, sgd(model), objective=objective, callbacks=[RunLog(tmp_path, tensorboard=False)]
    ) as trainer:
        outputs = [trainer.step(*batch).outputs for batch in trainer.epoch(LOADER)]
    assert [float(row["right"]) for row in rows(tmp_path)] == [one["right"] for one in outputs]
    found = [float(row["outputs/loss"]) for row in rows(tmp_path)]
    assert found == [one["loss"] for one in outputs]
    assert "rows" not in rows(tmp_path)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_folder_that_cant_be_written_is_told_before_training(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("evenstep.callbacks.table.write_file", full)
    trainer = open_trainer(build("convolution"), callbacks=[RunLog(tmp_path / "log")])
    with pytest.raises(SaveError, match=r"log in .* \(No space left on device\), and nothing was"):
        trainer.__enter__()
    assert trainer.steps_done == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_disk_that_fills_up_costs_the_log_only(tmp_path, caplog):
    log, losses = RunLog(tmp_path), Losses()
    with (
        caplog.at_level(logging.WARNING, "evenstep"),
        open_trainer(build("convolution"), callbacks=[log, losses]) as trainer,
    ):
        run_steps(trainer, 2)
        log._table._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
        run_steps(trainer, STEPS)
    assert len(losses.records) == STEPS
    lines = [line for line in caplog.messages if "could not be written" in line]
    assert lines == [
        f"the log in {tmp_path} could not be written (No space left on device): training "
        f"continues without it"
    ]
    assert len(rows(tmp_path)) == 2


@pytest.mark.parametrize("text", ["", "time,loss\n1,2\n", "step,loss\nx,1\n", "step\n\udcff\n"])
def test_a_foreign_table_is_refused(text, tmp_path):
    Path(tmp_path, "log.csv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"log\.csv was not written by evenstep"):
        logged(tmp_path)
    assert Path(tmp_path, "log.csv").read_bytes() == text.encode(errors="surrogateescape")


def test_a_line_that_is_not_whole_is_dropped(tmp_path):
    Path(tmp_path, "log.csv").write_text("step,loss\n1,2.5\n2,2")
    log = RunLog(tmp_path, tensorboard=False)
    log.open(1)
    log.add(2, {"loss": 3.0})
    log.add(2, {"accuracy": 0.75})
    log.add(2, {"accuracy": 0.5})
    log.add(3, {"loss": 1.0})
    log.close()
    text = Path(tmp_path, "log.csv").read_text()
    assert text == "step,loss,accuracy\n1,2.5,\n2,3,0.5\n3,1,\n"


def test_steps_are_logged_in_order(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.open(0)
    log.add(2, {"loss": 3.0})
    with pytest.raises(InputError, match="got step=1, but the log has step 2 already"):
        log.add(1, {"loss": 3.0})
    log.close()


def test_without_tensorboard_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install evenstep\[tensorboard\]"):
        RunLog(tmp_path)
