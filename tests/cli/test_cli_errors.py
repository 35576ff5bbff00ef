"""The command line when something is wrong: one clear line, the exit code, and nothing lost."""

import json
import re
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commands import MLP, complaint, steps_kept, trained
from evenstep.checkpoint.files import list_checkpoints, read_checkpoint
from evenstep.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


# --- what is typed wrongly


def test_restarts_without_processes_are_refused():
    line = complaint("train", *MLP, "--max-restarts", 3, code=2)
    assert line.endswith("got --max-restarts without --processes: add --processes NUMBER")


def test_an_empty_folder_of_checkpoints_is_refused():
    assert "--checkpoint-dir" in complaint("train", *MLP, "--checkpoint-dir", "", code=2)


def test_a_file_instead_of_a_module_and_a_model_that_is_made_already_are_answered(folder):
    (folder / "made_models.py").write_text(
        "from torch import nn\nmodel = nn.Linear(2, 2)\n", encoding="utf-8"
    )
    line = complaint("train", "--model", "made_models.py:Net", code=2)
    assert "leave out .py, and write made_models:Net" in line
    line = complaint("train", "--model", "made_models:model", code=2)
    assert "is a Linear that was made already: give a function that makes it" in line


def test_a_number_is_refused_in_plain_words():
    assert complaint("train", "--shards", 0, code=2) == (
        "evenstep: Invalid value for '--shards': 0 is not in the range 1<=x<=65536. "
        "(see main train --help)"
    )


# --- stopped, and failed


def test_ctrl_c_stops_within_the_step_and_saves():
    line = complaint(
        *("train", "--model", "cli_models:Interrupted", "--devices", 1, "--checkpoint-dir", "kept"),
        code=130,
    )
    assert line.startswith("evenstep: stopped after step 6 of 180")
    assert "--resume --checkpoint-dir kept" in line
    assert steps_kept() == [6]


def test_ctrl_c_without_a_folder_says_that_nothing_is_saved():
    line = complaint("train", "--model", "cli_models:Interrupted", "--devices", 1, code=130)
    assert "nothing is saved" in line


def test_ctrl_c_ends_any_command_as_a_shell_expects(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("evenstep.cli.verify.verify", interrupted)
    assert complaint("verify", code=130) == "evenstep: stopped"


def test_a_nan_stops_with_step_and_shard_and_the_last_checkpoint_stays_good():
    line = complaint(
        *("train", "--model", "cli_models:Diverges", "--devices", 1),
        *("--checkpoint-dir", "kept", "--checkpoint-every", 2),
        code=1,
    )
    assert "shard 5 " in line
    assert "in step 4 " in line
    assert "kept has the checkpoint of step 4" in line
    assert steps_kept() == [2, 4]
    assert read_checkpoint("kept")["steps_done"] == 4


def test_a_nan_is_no_reason_to_save():
    options = ("--model", "cli_models:Diverges", "--devices", 1, "--checkpoint-dir", "k")
    complaint("train", *options, code=1)
    assert list_checkpoints("k") == []


def test_a_model_that_breaks_is_saved_as_its_step_found_it():
    line = complaint(
        "train", "--model", "cli_models:Breaks", "--devices", 1, "--checkpoint-dir", "kept", code=2
    )
    assert re.search(r"in step 2 failed at .*cli_models\.py, line \d+, with RuntimeError", line)
    assert "out of ideas" in line
    assert steps_kept() == [2]


def test_a_run_that_took_no_step_leaves_nothing_that_stands_in_the_way():
    failing = ("train", "--model", "cli_models:unfit", "--checkpoint-dir", "kept")
    complaint(*failing, code=2)
    assert steps_kept() == []
    assert trained(*MLP, "--steps", 1, "--checkpoint-dir", "kept").steps == 1


def test_a_folder_that_has_a_run_is_not_written_over():
    trained(*MLP, "--steps", 2, "--checkpoint-dir", "kept")
    line = complaint("train", *MLP, "--checkpoint-dir", "kept", code=2)
    assert "step-00000002" in line
    assert "--resume" in line


def test_a_file_in_the_way_of_the_folder(folder):
    (folder / "kept").write_text("mine")
    line = complaint("train", *MLP, "--steps", 1, "--checkpoint-dir", "kept", code=1)
    assert "could not be written" in line
    assert (folder / "kept").read_text() == "mine"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run of one step, which no test changes."""
    folder = tmp_path_factory.mktemp("runs") / "kept"
    trained(*MLP, "--steps", 1, "--checkpoint-dir", folder)
    return folder


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--shards", 4), "shards 4 instead of 8"),
        (("--seed", 1), "seed 1 instead of 0"),
        (("--precision", "bf16"), "precision bf16 instead of fp32"),
        (("--threads", 2), "threads 2 instead of 1"),
        (("--memory-format", "channels_last"), "memory_format channels_last instead of"),
        (("--model", "lenet"), "--model lenet instead of mlp"),
        (("--data", "fashion-mnist"), "--data fashion-mnist instead of digits"),
        (("--batch-size", 64), "--batch-size 64 instead of 256"),
        (("--lr", 0.2, "--momentum", 0), "--lr 0.2 instead of 0.1, --momentum 0.0 instead of 0.9"),
    ],
)
def test_a_resume_of_another_experiment_is_refused(kept, options, part):
    before = read_checkpoint(kept)["fingerprint"]
    assert part in complaint("train", "--resume", "--checkpoint-dir", kept, *options, code=2)
    assert steps_kept(kept) == [1]
    assert read_checkpoint(kept)["fingerprint"] == before


def test_a_checkpoint_of_a_changed_model_names_the_tensors(folder):
    trained("--model", "cli_models:Net", "--steps", 1, "--checkpoint-dir", "kept")
    saved = json.loads((folder / "kept" / "run.json").read_text())
    del saved["sha256"]
    (folder / "kept" / "run.json").write_text(json.dumps({**saved, "model": "mlp"}))
    line = complaint("train", "--resume", "--checkpoint-dir", "kept", code=2)
    assert "a different model" in line
    assert "parameter 1.weight float32 (256, 784) instead of none" in line


def truncate(folder):
    path = list_checkpoints(folder)[-1] / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (truncate, "tensors.safetensors has"),
        (lambda folder: (folder / "run.json").unlink(), "run.json is missing"),
        (lambda folder: (folder / "run.json").write_text("{"), "run.json is damaged"),
        (lambda folder: (folder / "run.json").write_text('{"model": 3}'), "run.json is damaged"),
        (lambda folder: (folder / "run.json").write_bytes(b"\xff"), "run.json is damaged"),
    ],
)
def test_a_damaged_run_is_not_resumed(folder, kept, damage, part):
    shutil.copytree(kept, folder / "kept")
    damage(folder / "kept")
    assert part in complaint("train", "--resume", "--checkpoint-dir", "kept", code=2)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("train --devices gpu7", "got device 'gpu7'"),
        ("train --devices cuda:99", "torch sees"),
        ("train --devices 0", "at least 1"),
        ("train --devices cpu:0,cpu:0", "twice"),
        ("train --devices=", "got device ''"),
        ("train --model vgg", "lenet, resnet18, mlp"),
        ("train --model :x", "lenet, resnet18, mlp"),
        ("train --model net.py", "package.module:factory, such as net:Net"),
        ("train --model no.such.module:net", "No module named 'no'"),
        ("train --model broken_alone:net", "broken_alone.py, line 1"),
        ("train --model cli_models:nothing", "no function nothing"),
        ("train --model cli_models:not_a_function", "found a int"),
        ("train --model cli_models:no_module", "returned a int"),
        ("train --model cli_models:raises", "KeyError"),
        ("train --model cli_models:without_parameters", "nothing to train"),
        ("train --model cli_models:Uncopyable --devices 2", "can't be copied"),
        ("train --model cli_models:unfit", "in step 0 failed with RuntimeError"),
        ("train --data fashion-mnist --data-dir nowhere", "train-images-idx3-ubyte.gz is missing"),
        ("train --data-dir nowhere", "--data fashion-mnist"),
        ("train --data cifar", "--data"),
        ("train --lr abc", "'--lr': 'abc' is not a number."),
        ("train --epochs five", "'--epochs': 'five' is not an integer."),
        ("train --steps 1.5", "'--steps': '1.5' is not an integer."),
        ("train --epochs 0", "'--epochs': 0 is less than 1."),
        ("train --shards many", "--shards"),
        ("train --batch-size -1", "--batch-size"),
        ("train --lr nan", "--lr"),
        ("train --lr inf", "--lr"),
        ("train --lr -0.1", "--lr"),
        ("train --seed -1", "--seed"),
        ("train --seed 99999999999999999999", "--seed"),
        ("train --steps 0", "--steps"),
        ("train --precision fp8", "--precision"),
        ("train --resume", "without --checkpoint-dir"),
        ("train --auto-resume", "got --auto-resume without --checkpoint-dir"),
        ("train --checkpoint-every 3", "without --checkpoint-dir"),
        ("train --trace no/x", "got --trace no/x: expected a file in an existing folder"),
        ("explain .", "could not be read"),
        ("explain", "FILE"),
        ("train --resume --checkpoint-dir nowhere", "no checkpoint in nowhere"),
        ("train --json no/such/folder/run.json", "--json"),
        ("train --json .", "--json"),
        ("train --model cli_models:Normalised --batch-size 9 --steps 1", "too few for BatchNorm"),
        ("train --what", "No such option"),
        ("train extra", "extra"),
        ("verify --devices 1", "at least two"),
        ("verify --devices auto,1", "'auto'"),
        ("verify --devices 1,,2", "''"),
        ("verify --devices 1,x", "got device 'x'"),
        ("verify --devices 1,cuda:99", "torch sees"),
        ("verify --model vgg", "lenet, resnet18, mlp"),
        ("verify --model cli_models:unfit --steps 1", "RuntimeError"),
        ("verify --resume", "--resume"),
        (f"reproduce --out {'x' * 300}", "File name too long"),
        ("fly", "No such command"),
    ],
)
def test_bad_input_gets_one_clear_line(folder, arguments, part):
    (folder / "broken_alone.py").write_text("import nothing_of_that_name\n")
    assert part in complaint(*arguments.split(" "), code=2)


def test_an_error_in_the_update_is_not_hidden_by_the_save_that_it_forbids():
    """The fourth update fails when a parameter was written: the third step is lost."""
    updates = []

    def fail(optimizer, *_):
        updates.append(optimizer)
        if len(updates) == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(2)
            raise LookupError("bang")

    hook = register_optimizer_step_pre_hook(fail)
    try:
        given = ["train", *MLP, "--checkpoint-dir", "kept", "--checkpoint-every", "2"]
        result = CliRunner().invoke(main, [*given, "--steps", "4"])
    finally:
        hook.remove()
    assert isinstance(result.exception, LookupError), result.output
    assert steps_kept() == [2]
