"""The command line as a process of its own: signals, pipes, terminals, a full disk."""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from commands import MLP, steps_kept, the_line, trained
from evenstep.checkpoint.files import read_checkpoint
from patience import wait_until
from screen import read_all
from warm import Job, run

# Background jobs are started with SIGINT ignored, and so would be what these tests start from one.
PROGRAM = """
import resource, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from evenstep.cli import main
main(prog_name="evenstep")
"""


def start(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, arguments)], **pipes)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_saves_and_a_resume_ends_with_the_unbroken_fingerprint(tmp_path, number):
    folder = tmp_path / "kept"
    options = (*MLP, "--epochs", 10**6, "--checkpoint-dir", folder, "--devices", 2)
    job = Job("-c", PROGRAM, "train", *options, "--checkpoint-every", 7)
    wait_until(lambda: steps_kept(folder) or job.poll() is not None)
    job.send_signal(number)
    output, errors = job.communicate(60)
    assert job.returncode == 128 + number, errors
    assert output.count("stopping after this step") == 1
    step = int(re.search(r"stopped after step (\d+) of", the_line(errors))[1])
    assert steps_kept(folder)[-1] == step
    resumed = trained("--resume", "--checkpoint-dir", folder, "--steps", step + 2, "--devices", 1)
    assert resumed.fingerprint == trained(*MLP, "--steps", step + 2).fingerprint


def test_python_m_evenstep_is_the_command():
    command = [sys.executable, "-m", "evenstep"]
    good = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"evenstep \d+\.\d+\.\d+\n", good.stdout)
    bad = subprocess.run([*command, "train", "--shards", "0"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert (bad.stdout, bad.stderr.count("\n")) == ("", 1)
    assert bad.stderr.startswith("evenstep: ")


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_run_and_it_is_saved(tmp_path):
    folder = tmp_path / "kept"
    with start("train", *MLP, "--epochs", 10**6, "--checkpoint-dir", folder) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert read_checkpoint(folder)["steps_done"] > 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_an_output_that_is_full_ends_the_run_and_it_is_saved(tmp_path):
    folder = tmp_path / "kept"
    with open("/dev/full", "w") as full:
        options = (*MLP, "--steps", 1, "--checkpoint-dir", folder)
        process = start("train", *options, stdout=full)
        errors = process.communicate(60)[1]
    assert process.returncode == 1
    assert the_line(errors) == ("evenstep: the output can't be written (No space left on device)")
    assert steps_kept(folder) == [1]


def test_a_disk_that_is_full_keeps_the_earlier_checkpoint(tmp_path):
    """A limit on file sizes simulates it: the last checkpoint does not fit."""
    folder = tmp_path / "kept"
    first = trained(*MLP, "--steps", 1, "--checkpoint-dir", folder)
    limited = PROGRAM.replace(
        "from", "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\nfrom", 1
    )
    resume = ("train", "--resume", "--steps", 2, "--checkpoint-dir", folder)
    ended = run("-c", limited, *resume)
    assert ended.returncode == 1
    assert "step-00000002 could not be written" in the_line(ended.stderr)
    assert steps_kept(folder) == [1]
    assert read_checkpoint(folder)["fingerprint"] == first.fingerprint


@pytest.mark.slow
def test_on_a_narrow_terminal_the_view_is_live_and_the_fingerprint_whole():
    terminal, side = pty.openpty()
    environment = {**os.environ, "COLUMNS": "30", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    with start(
        *("train", *MLP, "--epochs", 2, "--devices", "cpu:0,cpu:1"),
        stdout=side,
        stderr=side,
        env=environment,
        text=False,
    ) as process:
        os.close(side)
        screen = read_all(terminal).decode()
    assert process.returncode == 0
    assert re.search(r"cpu:1.*\d+% busy", screen)
    assert re.search(r"\d:\d\d:\d\d left", screen)
    assert "\x1b[2K" in screen  # a line that is erased, to be drawn again
    unbroken = trained(*MLP, "--epochs", 2).fingerprint
    assert unbroken in screen
