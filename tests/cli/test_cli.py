"""The command line: what `train`, `verify` and `devices` do, and what they print."""

import functools
import json
import os
import re
import sys

import pytest
import torch
from test_record import KEYS
from torch import nn
from torch.nn import functional as F

from commands import EPOCH_STEPS, MLP, complaint, run, steps_kept, trained
from evenstep import Trainer, data, models
from evenstep.cli.training.record import TrainRecord
from evenstep.devices import usable_cores


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def unbroken():
    """The records of the MLP after some numbers of steps, on one device."""
    return functools.cache(lambda steps: trained(*MLP, "--steps", steps, "--devices", 1))


# --- train: what it says


def test_json_on_stdout_has_these_keys_and_leaves_everything_else_to_stderr():
    result = run("train", *MLP, "--steps", 2, "--json", "-")
    assert list(json.loads(result.stdout)) == KEYS
    assert result.stdout.count("\n") == 1
    assert "test accuracy" in result.stderr
    assert "fingerprint" in result.stderr


def test_json_in_a_file_is_what_the_table_says(folder):
    result = run("train", *MLP, "--steps", 8, "--devices", "cpu:0,cpu:3", "--json", "run.json")
    record = TrainRecord.from_json((folder / "run.json").read_text())
    rows = dict(re.findall(r"^([a-z/ ]+?)  +(.*)$", result.stdout, re.MULTILINE))
    assert rows["test accuracy"] == f"{record.test_accuracy:.4f}"
    assert rows["train loss"] == f"{record.train_loss:.4f}"
    assert rows["devices"] == "cpu:0, cpu:3" == ", ".join(record.devices)
    assert rows["shards"] == "8"
    assert rows["fingerprint"] == record.fingerprint
    assert re.fullmatch(r"[0-9a-f]{64}", record.fingerprint)
    assert (record.model, record.data, record.seed) == ("mlp", "digits", 0)
    assert (record.steps, record.epochs, record.batch_size) == (8, 2, 256)


def test_the_speed_counts_every_example_once():
    record = trained(*MLP, "--epochs", 1)
    assert record.seconds_per_epoch * record.examples_per_second == pytest.approx(1438)


def test_on_a_pipe_each_epoch_is_a_plain_line():
    lines = run("train", *MLP, "--epochs", 3, "--steps", 14).stdout.splitlines()
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert [re.findall(r"(\w+) +(\d+/\d+)", line) for line in epochs] == [
        [("epoch", "1/3"), ("step", "6/14")],
        [("epoch", "2/3"), ("step", "12/14")],
    ]
    assert not any("\x1b" in line for line in lines)


def test_each_epoch_ends_with_the_accuracy_of_its_weights():
    lines = run("train", *MLP, "--epochs", 2, "--devices", 2, "--in-flight", 2).stdout.splitlines()
    shown = [re.search(r"test accuracy (\S+)", line)[1] for line in lines if line[:6] == "epoch "]
    records = [trained(*MLP, "--epochs", epochs) for epochs in (1, 2)]
    assert shown == [f"{record.test_accuracy:.4f}" for record in records]


@pytest.mark.slow
def test_compiling_is_said_before_the_first_step():
    lines = run("train", *MLP, "--steps", 1, "--compile").stdout.splitlines()
    assert lines[0] == "compiling: the first step takes longer"


def test_the_train_loss_is_the_mean_over_the_epochs_examples():
    # A rate of 0 leaves the weights as the seed made them.
    record = trained("--model", "mlp", "--lr", 0, "--epochs", 2, "--seed", 7)
    torch.manual_seed(7)
    images, labels = data.digits().tensors
    expected = F.cross_entropy(models.mlp()(images), labels).item()
    assert record.train_loss == pytest.approx(expected, rel=1e-5)


def test_the_test_accuracy_is_that_of_the_saved_model():
    record = trained(*MLP, "--epochs", 3, "--checkpoint-dir", "kept", "--devices", 2)
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaded = Trainer.load("kept", model, optimizer, nn.CrossEntropyLoss(), devices=1)
    assert loaded.fingerprint() == record.fingerprint
    images, labels = data.digits(train=False).tensors
    right = (model(images).argmax(1) == labels).sum().item()
    assert record.test_accuracy == right / len(labels)


def test_notes_are_printed_once():
    result = run("train", *MLP, "--steps", 1, "--shards", 2, "--devices", 3)
    assert result.stderr.count("2 shards keep 2 of 3 devices busy") == 1


def test_the_command_line_makes_cublas_deterministic(monkeypatch):
    run("--version")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    run("--version")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


# --- train: the same result


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--seed", 1), ("--shards", 7), ("--batch-size", 255)),
        *(("--lr", 0.2), ("--momentum", 0.8), ("--precision", "bf16")),
    ],
)
def test_every_choice_reaches_the_training(option, value, unbroken):
    assert trained(*MLP, "--steps", 2, option, value).fingerprint != unbroken(2).fingerprint


def test_the_length_is_that_of_steps_and_epochs_whichever_comes_first():
    for options, steps in (
        ((*MLP, "--steps", 2, "--epochs", 1), 2),
        ((*MLP, "--steps", 20, "--epochs", 1), EPOCH_STEPS),
        (("--model", "cli_models:Net", "--batch-size", 1438), 30),  # epochs of one step
        (("--model", "cli_models:Net", "--batch-size", 1000, "--epochs", 2), 4),
        (("--model", "cli_models:Net", "--batch-size", 1000, "--epochs", 2, "--drop-last"), 2),
    ):
        assert trained(*options).steps == steps


def test_a_model_of_ones_own_is_found_in_the_current_folder(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (folder / "mine_alone.py").write_text(
        "from evenstep.models import mlp\ndef small(): return mlp(hidden=(32,))\n"
    )
    record = trained("--model", "mine_alone:small", "--steps", 2)
    assert record.model == "mine_alone:small"
    torch.manual_seed(0)
    optimizer = torch.optim.SGD((model := models.mlp(hidden=(32,))).parameters(), lr=0.1)
    with Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=1) as trainer:
        loader = data.Loader(data.digits(), 256)
        for _, batch in zip(range(2), trainer.epoch(loader), strict=False):
            trainer.step(*batch)
    assert trainer.fingerprint() == record.fingerprint


# --- resume


@pytest.mark.parametrize("stop", [4, EPOCH_STEPS, 9])
def test_a_resume_on_other_devices_ends_with_the_unbroken_fingerprint(stop, unbroken):
    trained(*MLP, "--steps", stop, "--devices", 1, "--checkpoint-dir", "kept")
    resumed = trained("--resume", "--steps", 15, "--devices", 3, "--checkpoint-dir", "kept")
    assert resumed.fingerprint == unbroken(15).fingerprint
    assert (resumed.steps, resumed.epochs) == (15, 3)
    assert resumed.test_accuracy == unbroken(15).test_accuracy


FEATURES = """
import numpy, random, torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.random = torch.randn(784, 16) / 28  # no buffer, so in no checkpoint
        self.scales = torch.from_numpy(numpy.random.rand(16).astype("float32"))
        self.shift = random.random()
        self.last = nn.Linear(16, 10)

    def forward(self, x):
        return self.last((x.flatten(1) @ self.random * self.scales + self.shift).relu())
"""


def test_a_resume_draws_again_what_a_model_holds_beside_its_buffers(folder):
    (folder / "mine_random.py").write_text(FEATURES)
    mine = ("--model", "mine_random:Net", "--seed", 3)
    whole = trained(*mine, "--steps", 4)
    trained(*mine, "--steps", 2, "--checkpoint-dir", "kept")
    resumed = trained("--resume", "--steps", 4, "--checkpoint-dir", "kept")
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.test_accuracy == whole.test_accuracy


def test_a_resume_keeps_the_choices_and_the_length_of_the_run():
    options = ("--model", "mlp", "--lr", 0.05, "--seed", 3, "--shards", 5, "--batch-size", 200)
    unbroken = trained(*options, "--steps", 7)
    trained(*options, "--steps", 3, "--checkpoint-dir", "kept")
    trained("--resume", "--steps", 5, "--checkpoint-dir", "kept")
    trained("--resume", "--steps", 7, "--checkpoint-dir", "kept")
    again = trained("--resume", "--checkpoint-dir", "kept")
    assert again.fingerprint == unbroken.fingerprint
    assert (again.model, again.seed, again.shards, again.batch_size) == ("mlp", 3, 5, 200)


def test_a_finished_run_has_nothing_left_to_train():
    first = trained(*MLP, "--steps", 3, "--checkpoint-dir", "kept")
    again = trained("--resume", "--checkpoint-dir", "kept")
    assert again.fingerprint == first.fingerprint
    assert (again.steps, again.test_accuracy) == (3, first.test_accuracy)
    assert again.train_loss is again.seconds_per_epoch is again.examples_per_second is None


def test_a_resume_takes_the_same_options_given_again():
    options = (*MLP, "--shards", 5, "--seed", 2, "--checkpoint-dir", "kept")
    trained(*options, "--steps", 2)
    assert trained(*options, "--resume", "--steps", 4).steps == 4


def test_it_saves_after_each_epoch_or_every_so_many_steps_and_at_the_end():
    trained(*MLP, "--steps", 8, "--checkpoint-dir", "kept", "--checkpoint-every", 3)
    assert steps_kept() == [3, 6, 8]
    trained(*MLP, "--steps", 14, "--checkpoint-dir", "by epoch")
    assert steps_kept("by epoch") == [6, 12, 14]


# --- verify and devices


def test_verify_prints_the_fingerprint_that_train_ends_with(unbroken):
    result = run("verify", *MLP, "--steps", 8, "--devices", "1,3,cpu:0+cpu:1:own")
    rows = dict(line.split() for line in result.stdout.splitlines()[1:4])
    assert rows == dict.fromkeys(["1", "3", "cpu:0+cpu:1:own"], unbroken(8).fingerprint)
    assert result.stdout.splitlines()[4].startswith("identical: ")


@pytest.mark.slow
def test_verify_of_compiled_shards():
    result = run("verify", *MLP, "--steps", 2, "--devices", "1,2", "--compile")
    assert "identical: the same bits after each of 2 steps" in result.stdout
    assert "note: compile: a shard takes" in result.stderr


def test_verify_trains_twenty_steps_on_one_two_and_three_devices():
    result = run("verify", *MLP)
    assert "20 steps" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == ["1", "2", "3"]


def test_verify_names_what_breaks_the_promise():
    line = complaint("verify", "--model", "cli_models:DrawsFromRandom", "--steps", 2, code=2)
    assert "a shard draws from Python's random module in" in line
    assert "cli_models.py, line" in line


def test_verify_names_the_shard_where_the_second_device_begins():
    """The check of a first step does not see it: that is made on the first device."""
    result = run("verify", "--model", "cli_models:Scaled", "--steps", 2, "--devices", "1,2", code=1)
    assert "not identical: 1 and 2 differ" in result.stdout
    assert re.search(r"first step +0 ", result.stdout)
    assert re.search(r"first shard +2 ", result.stdout)  # none is stolen in the replay
    assert re.search(r"first tensor +gradient of layer.weight", result.stdout)
    assert "Python state" in result.stdout.partition("usual causes")[2]
    assert "\nidentical" not in result.stdout


def test_batch_norm_over_the_whole_batch_is_another_experiment_with_one_result(folder):
    by_shard, synced = (
        run("verify", "--model", "cli_models:Normalised", "--steps", 3, "--batch-norm", one).stdout
        for one in ("shard", "sync")
    )
    assert "identical" in by_shard
    assert "identical" in synced
    assert by_shard != synced


def test_devices_tells_what_there_is_and_what_would_differ():
    output = run("devices").stdout
    assert f"{usable_cores()} usable" in output
    assert torch.__version__ in output
    for word in ("memory", "--threads", "--shards", "--precision", "device model"):
        assert word in output
