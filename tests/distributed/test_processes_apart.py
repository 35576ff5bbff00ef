"""Processes that differ in what nobody looks at: containers, processors, settings."""

import json
import os
import re
import subprocess

import pytest

from commands import MLP, run
from evenstep.checkpoint.training_state import read_training_state
from launched import alone, apart

OWN_MEMORY = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
"""A command that gives the command after it a /dev/shm of its own, as a container has."""

CPU_TUNABLE, OTHER_TUNABLE = "glibc.cpu.x86_hwcaps=-AVX2_Usable", "glibc.malloc.arena_max=2"


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
@pytest.mark.slow
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


# Settings that differ: all kinds are trained one after the other, in the same two processes

STARTS = {
    "lr": r"lr of parameter group 0 is 0\.2 on rank 1 \(.*\), but 0\.1 on rank 0",
    "momentum": r"momentum of parameter group 0 is 1\.8 on rank 1 .* but 0\.9 on rank 0",
    "weight_decay": r"weight_decay of parameter group 0 is 0\.02 on rank 1 .* but 0\.01 on rank 0",
    "another optimizer": r"the class of the optimizer is Adam on rank 1 .* but SGD on rank 0",
    "layers": r"layer \d is Dropout\(p=0\.2\) on rank 1 .* but Dropout\(p=0\.1\) on rank 0",
    "loss": r"loss is CrossEntropyLoss\(.*label_smoothing=0\.1\) on rank 1 .*=0\.0\) on rank 0",
    "class weights": r"the digest of loss weight is \w+ on rank 1 .* but \w+ on rank 0",
}
LATE = (
    *("late, save", "late, save in background", "late, evaluate", "late, predict", "late, end"),
    "late, in flight, end",
)


@pytest.mark.slow
def test_another_setting_in_one_process_is_refused_by_all(tmp_path):
    ends = found(tmp_path, *STARTS, "hidden", "hidden, in flight", *LATE)
    for end in ends:
        for kind, pattern in STARTS.items():
            expected = f"InputError: the processes disagree about what is trained: {pattern}"
            assert re.match(expected, end[kind]["error"])
            assert end[kind]["steps"] == 0
        for kind in ("hidden", "hidden, in flight"):
            assert re.match(
                r"DivergedError: rank 1 \(on .*\) differs from the other processes after step 1: "
                r"the first tensor that differs is ",
                end[kind]["error"],
            )
            assert end[kind]["steps"] == 1
        for kind in LATE:
            assert re.match(
                r"DivergedError: rank 1 \(on .*\) differs from the other processes after step 4: "
                r"lr of parameter group 0 is 0\.05 instead of 0\.1\. ",
                end[kind]["error"],
            )
            assert end[kind]["reached"] == ("passed" if "end" in kind else "nothing")
    assert not (tmp_path / "saved").exists()


# Processors, libraries and settings of them that differ

OTHER = (
    r"the processes (would )?round differently: the CPU capability is DEFAULT on rank 1 \(.*\), "
    r"but (?!DEFAULT)\w+ on rank 0 \("
)
ROUNDING = "results are equal within rounding, not bit for bit"


@pytest.mark.slow
def test_another_processor_is_refused_or_followed_within_rounding(one_process, tmp_path):
    kinds = ("allowed, evaluate", "allowed, in flight, save", "allowed, save in background")
    variables = [{}, {"ATEN_CPU_CAPABILITY": "default"}]
    ends = found(
        tmp_path, "plain", *kinds, "allowed, late, end", "allowed, hidden", variables=variables
    )
    for end in ends:
        assert re.match(f"InputError: {OTHER}", end["plain"]["error"])
        assert end["plain"]["steps"] == 0
        for kind in kinds:
            assert end[kind]["error"] is None
            assert end[kind]["within_rounding"]
            (note,) = end[kind]["notes"]
            assert re.match(OTHER, note)
            assert note.endswith(ROUNDING)
        assert "DivergedError: rank 1" in end["allowed, late, end"]["error"]
        assert "by more than rounding explains" in end["allowed, hidden"]["error"]
    for kind in kinds:  # the processes end as one training
        assert ends[0][kind]["fingerprint"] == ends[1][kind]["fingerprint"]
    assert read_training_state(tmp_path / "saved").within_rounding
    assert not one_process["within_rounding"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("MKL_CBWR", "COMPATIBLE"), ("GLIBC_TUNABLES", CPU_TUNABLE)]
)
def test_a_setting_of_a_library_in_one_environment_is_named(tmp_path, name, value):
    for end in found(tmp_path, "plain", variables=[{}, {name: value}]):
        assert f"{name} is {value} on rank 1" in end["plain"]["error"]


TORCH = {
    "denormal": "the treatment of denormal numbers is flushed on rank 1",
    "precision": "the float32 precision is matmul bf16, conv none, rnn none on rank 1",
    "newer precision": "conv bf16, rnn bf16 on rank 1",
    "dtype": "the default dtype is torch.float64 on rank 1",
    "threads": "the number of threads of a device is 2 on rank 1",
}


@pytest.mark.slow
def test_a_setting_of_torch_in_one_process_is_named(one_process, tmp_path):
    variables = [{}, {"GLIBC_TUNABLES": OTHER_TUNABLE}]
    for end in found(tmp_path, *TORCH, "plain", "allowed", variables=variables):
        for kind, text in TORCH.items():
            assert text in end[kind]["error"]
        for kind in ("plain", "allowed"):  # nothing differs that decides bits
            assert end[kind]["fingerprint"] == one_process["fingerprint"]
            assert not end[kind]["within_rounding"]
            assert not end[kind]["notes"]


@pytest.mark.slow
def test_the_command_line_says_that_a_result_is_equal_within_rounding(tmp_path):
    variables = [{}, {"ATEN_CPU_CAPABILITY": "default"}]
    record, kept = tmp_path / "record.json", tmp_path / "kept"
    train = ("train", *MLP, "--steps", 8, "--devices", 1, "--checkpoint-dir", kept)
    for code, _, errors in apart("command.py", *train, variables=variables):
        assert code == 2
        assert "give --allow-rounding" in errors
    allowed = (*train, "--allow-rounding", "--json", record)
    (code, output, errors), (other, *_) = apart("command.py", *allowed, variables=variables)
    assert (code, other) == (0, 0), errors
    assert f"bits {ROUNDING}" in " ".join(output.split())
    assert json.loads(record.read_text())["within_rounding"]
    resumed = run("train", "--resume", "--checkpoint-dir", kept, "--steps", 9, "--json", record)
    assert ROUNDING in " ".join(resumed.stdout.split())
    assert f"mixed kinds: {ROUNDING}" in resumed.stderr
    assert json.loads(record.read_text())["within_rounding"]
