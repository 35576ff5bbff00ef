"""`evenstep train --processes`: one fingerprint, one output, one error line."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import MLP, run, steps_kept, the_line, trained
from evenstep.cli.training.record import TrainRecord
from job_processes import EVENSTEP, children_of, listening_at, start, wait_for_workers
from launched import free_port
from patience import wait_until


def wait_for_step(folder, step, process):
    """Wait until there is a checkpoint of this step or a later one."""
    for _ in range(2400):
        if any(kept >= step for kept in steps_kept(folder)):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.025)
    raise AssertionError(f"no checkpoint of step {step}")


def is_alive(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_two_processes_give_the_fingerprint_of_one(tmp_path):
    file = tmp_path / "record.json"
    options = (*MLP, "--steps", 20, "--in-flight", 2)
    process = start("train", *options, "--processes", 2, "--devices", 1, "--json", file)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.count("fingerprint") == 1
    assert re.findall(r"^process (\d), (cpu:\d) +\d+%", output, re.MULTILINE) == [
        *(("0", "cpu:0"), ("1", "cpu:0"))
    ]
    assert output.count("waiting") == 2  # the heads of one table
    together, by_itself = TrainRecord.from_json(file.read_text()), trained(*options)
    assert together.fingerprint == by_itself.fingerprint
    assert together.train_loss == by_itself.train_loss
    assert together.test_accuracy == by_itself.test_accuracy


@pytest.mark.slow
def test_on_one_machine_everything_listens_on_the_loopback_alone():
    options = ("--processes", 2, "--devices", 1, "--steps", 10**6)
    process = start("train", *MLP, *options)
    try:
        workers = wait_for_workers(process, 2)
        assert process.stdout.readline().startswith("epoch ")
        listens = [place for pid in (process.pid, *workers) for place in listening_at(pid)]
    finally:
        process.terminate()
        process.communicate()
    assert listens  # the store's: on one machine the workers need none
    assert {address for address, _ in listens} == {"0100007F"}  # 127.0.0.1


@pytest.mark.slow
def test_what_fails_everywhere_is_said_once():
    process = start("train", *MLP, "--processes", 2, "--model", "nowhere:model")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "nowhere" in the_line(errors)


@pytest.mark.slow
def test_under_torchrun_the_first_error_is_said_once():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "evenstep", "train", "--model", "cli_models:BreaksInRankOne", "--devices", "1"]
    finished = subprocess.run(
        [sys.executable, *torchrun, *train],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode
    lines = [line for line in finished.stderr.splitlines() if line.startswith("evenstep: ")]
    assert len(lines) == 1, finished.stderr
    assert "rank 1 has a problem of its own" in lines[0]
    assert "failed at" in lines[0]  # the place in the code, as the process itself knows it


@pytest.mark.slow
def test_sigterm_saves_one_checkpoint_and_leaves_no_process(tmp_path):
    folder = tmp_path / "kept"
    options = ("--processes", 2, "--devices", 1, "--steps", 10**6, "--checkpoint-every", 50)
    process = start("train", *MLP, *options, "--checkpoint-dir", folder)
    wait_for_step(folder, 50, process)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    step = int(re.search(r"stopped after step (\d+) of", errors)[1])
    assert steps_kept(folder)[-1] == step
    assert not [worker for worker in workers if is_alive(worker)]
    resumed = trained("--resume", "--checkpoint-dir", folder, "--steps", step + 2)
    assert resumed.fingerprint == trained(*MLP, "--steps", step + 2).fingerprint


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_and_the_run_is_saved(tmp_path):
    folder = tmp_path / "kept"
    options = ("--processes", 2, "--devices", 1, "--steps", 10**6, "--checkpoint-every", 10**6)
    process = start("train", *MLP, *options, "--checkpoint-dir", folder)
    workers = wait_for_workers(process, 2)
    assert process.stdout.readline().startswith("epoch ")
    process.kill()
    wait_until(lambda: not any(is_alive(worker) for worker in workers))
    process.communicate()
    assert len(steps_kept(folder)) == 1


@pytest.mark.slow
def test_a_process_that_is_stopped_before_it_has_met_the_other_one(tmp_path):
    """The other one gives up; then both are started again, and train to the end."""
    folder, file = tmp_path / "kept", tmp_path / "record.json"
    options = ("--processes", 2, "--devices", 1, "--steps", 60, "--checkpoint-every", 20)
    faults = ("--max-restarts", 5, "--timeout", 5, "--json", file, "--checkpoint-dir", folder)
    launcher = start("train", *MLP, *options, *faults)
    early = other, stopped = sorted(wait_for_workers(launcher, 2))
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: not is_alive(other))
    os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: not {*early} & {*children_of(launcher.pid)} or launcher.poll() is not None)
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, errors
    assert max(steps_kept(folder)) == 60
    expected = trained(*MLP, "--steps", 60).fingerprint
    assert TrainRecord.from_json(file.read_text()).fingerprint == expected


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(tmp_path):
    folder = tmp_path / "kept"
    trained(*MLP, "--steps", 20, "--checkpoint-every", 10, "--checkpoint-dir", folder)
    newest = folder / "step-00000020" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    launched_again = {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "1"}
    launched_again |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    launched_again |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    file = tmp_path / "record.json"
    finished = subprocess.run(
        [*EVENSTEP, "train", *MLP, "--steps", "30", "--checkpoint-dir", folder, "--json", file],
        env={**os.environ, **launched_again},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "step-00000020" in finished.stderr
    assert TrainRecord.from_json(file.read_text()).fingerprint == (
        trained(*MLP, "--steps", 30).fingerprint
    )


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_after_a_kill_the_run_goes_on_from_the_last_checkpoint(tmp_path, victim):
    folder, file = tmp_path / "kept", tmp_path / "record.json"
    options = ("--processes", 2, "--max-restarts", 2, "--devices", 1, "--checkpoint-every", 25)
    more = ("--checkpoint-dir", folder, "--json", file)
    process = start("train", *MLP, "--steps", 900, *options, *more)
    wait_for_step(folder, 50, process)
    workers = children_of(process.pid)
    os.kill(workers[victim], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert TrainRecord.from_json(file.read_text()).fingerprint == (
        trained(*MLP, "--steps", 900).fingerprint
    )
    assert not [worker for worker in workers if is_alive(worker)]


def test_auto_resume_begins_where_nothing_is_and_else_goes_on_from_the_newest_whole(tmp_path):
    kept = ("--checkpoint-every", 10, "--checkpoint-dir", tmp_path / "kept")
    options = (*MLP, "--auto-resume", *kept)
    assert trained(*options, "--steps", 20).steps == 20
    newest = tmp_path / "kept" / "step-00000020" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    again = run("train", *options, "--steps", 30, "--json", "-")
    assert "step-00000020" in again.stderr
    expected = trained(*MLP, "--steps", 30).fingerprint
    assert TrainRecord.from_json(again.stdout).fingerprint == expected


TALKATIVE = """
import os
from evenstep.models import lenet

def net():
    os.write(1, b"[a library of C++ says something]")
    print("[so does the model]")
    return lenet()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_only_the_record_is_on_stdout(tmp_path, processes):
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    command = [*EVENSTEP, "train", "--model", "talkative:net", "--steps", "2", "--json", "-"]
    command += ["--processes", str(processes), "--devices", "1", "--data", "digits"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert TrainRecord.from_json(done.stdout).steps == 2
    assert "[a library of C++ says something]" in done.stderr
    assert "[so does the model]" in done.stderr
