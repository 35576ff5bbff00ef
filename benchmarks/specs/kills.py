"""Kills training processes, again and again, and checks the result.

Every training is killed (SIGKILL) several times. "worker" kills one of two processes after a
random step was saved, and "writer" the process that saves while it writes a checkpoint; the
launcher starts both again. "all" kills every process of a training after a random step was saved;
it is started again on other devices and processes. "stopped" stops one of two processes (SIGSTOP),
and lets it go on after the other has waited for it longer than its time limit. A training has
recovered if it ends by itself, leaves no process behind, and has the fingerprint of an undisturbed
run in one process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmark import Benchmark, Contender, column
from evenstep.bench.tables import Table, cells
from evenstep.checkpoint.files import list_checkpoints
from evenstep.cli.training.record import TrainRecord

STEPS, EVERY, KILLS = 600, 20, 10
LIMIT_S, TIMEOUT_S = 240, 5  # processes start one after the other on a loaded machine
TRAIN = f"train --model mlp --data digits --momentum 0.9 --steps {STEPS}"
KINDS = {
    "worker": "any process, after a random step was saved",
    "writer": "the process that saves, in the middle of a checkpoint",
    "all": "all processes, after a random step was saved; started again on other devices",
    "stopped": "any process: stopped, not killed, for longer than the other one waits",
}
LAYOUTS = (  # of "all": CPU devices, with and without memory of their own, in one process or two
    "--devices 1",
    "--devices 2 --in-flight 2",
    "--devices 3",
    "--devices cpu:0:own,cpu:1:own --in-flight 2",
    "--processes 2 --devices 1",
    "--processes 2 --devices 2 --in-flight 2",
)
RESTARTED = f"--processes 2 --devices 1 --max-restarts {2 * KILLS}"


class Run:
    """A training in a folder, which can be started again.

    Attributes:
        process: the launcher.
    """

    def __init__(self, folder: Path, kind: str = "") -> None:
        self._folder, self._kind, self._file = folder / "kept", kind, folder / "record.json"
        self.start()

    def start(self) -> None:
        """Start the training, from the newest checkpoint."""
        saving = f"--checkpoint-dir {self._folder} --checkpoint-every {EVERY}"
        options = {
            "": "--devices 1",
            "all": f"{saving} --auto-resume {random.choice(LAYOUTS)}",
            "stopped": f"{saving} {RESTARTED} --timeout {TIMEOUT_S}",
        }.get(self._kind, f"{saving} {RESTARTED}")
        command = [sys.executable, "-m", "evenstep", *f"{TRAIN} {options}".split()]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            [*command, "--json", str(self._file)], **quiet, start_new_session=True
        )

    def fingerprint(self) -> str | None:
        """Return the fingerprint at the end; None if there was none."""
        text = self._file.read_text() if self._file.exists() else None
        return TrainRecord.from_json(text).fingerprint if text else None

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, or the training has ended."""
        deadline = time.monotonic() + LIMIT_S
        while not condition() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0005)

    def end(self) -> str:
        """Wait for the end; return what was written to stderr."""
        try:
            return self.process.communicate(timeout=LIMIT_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return "it did not end"

    def workers(self) -> list[psutil.Process]:
        """Return the processes that the launcher has started for ranks."""
        with contextlib.suppress(psutil.Error):
            return [one for one in psutil.Process(self.process.pid).children() if _rank(one) >= 0]
        return []

    def victims(self, step: int) -> list[psutil.Process]:
        """Wait until a step was saved, and for a write; return whom to kill, the victim first."""

        def is_reached() -> bool:
            names = [one.name.removesuffix(".old") for one in list_checkpoints(self._folder)]
            is_saved = any(int(name.removeprefix("step-")) >= step for name in names)
            return is_saved and (self._kind == "all" or len(self.workers()) == 2)

        self.wait(is_reached)
        if self._kind == "all":
            return [*self.workers(), psutil.Process(self.process.pid)]
        if self._kind == "writer":
            self.wait(lambda: any(self._folder.glob(".step-*writing-*")))
        rank = 0 if self._kind == "writer" else random.randrange(2)
        return sorted(self.workers(), key=lambda one: _rank(one) != rank)


def disturbed(contender: Contender) -> dict[str, Any]:
    """Train once with `KILLS` kills, and return how the training ended."""
    expected, kind = undisturbed(), contender.key
    last = STEPS - EVERY if kind != "writer" else STEPS - 3 * EVERY
    with tempfile.TemporaryDirectory() as place:
        began_s, killed, seen = time.monotonic(), 0, set[psutil.Process]()
        training = Run(Path(place), kind)
        for step in sorted(random.sample(range(0, last, EVERY), KILLS)):
            victims = training.victims(step)
            seen.update(victims)
            if kind == "stopped":
                killed += _send(signal.SIGSTOP, victims[:1])
                time.sleep(2 * TIMEOUT_S)
                _send(signal.SIGCONT, victims[:1])
                training.wait(lambda gone=victims: not any(map(_is_alive, gone)))
            else:
                killed += _send(signal.SIGKILL, victims if kind == "all" else victims[:1])
            if kind == "all":
                training.process.communicate()
                training.start()
        errors, code = training.end(), training.process.returncode
        return {
            "seconds": round(time.monotonic() - began_s, 2),
            "killed": killed,
            "same": expected is not None and training.fingerprint() == expected,
            "left": [one.pid for one in seen if _is_alive(one)],
            "exit_code": code,
            "errors": errors[-300:] if code else "",
        }


@functools.cache
def undisturbed() -> str | None:
    """Return the fingerprint of one process on one device that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        training = Run(Path(folder))
        training.process.communicate()
        return training.fingerprint()


def _send(what: signal.Signals, processes: Sequence[psutil.Process]) -> int:
    """Send a signal to processes; return 1 if the first one got it, 0 if it had ended before."""
    reached = [one for one in processes if _is_alive(one)]
    for one in reached:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(what)
    return int(reached[:1] == list(processes[:1]) != [])


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _rank(process: psutil.Process) -> int:
    """Return the rank of a worker; -1 for another process, or one that is gone."""
    with contextlib.suppress(psutil.Error):
        return int(process.environ().get("RANK", -1))
    return -1


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of kills."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        well = sum(run["same"] and not run["left"] for run in runs)
        counts = map(str, (sum(column(runs, "killed")), len(runs), well))
        rows.append([one.label, *counts, *cells(column(runs, "seconds"))])
    head = ("killed", "kills", "trainings", "recovered", "seconds from start to end", "spread")
    return {"kills": Table(head, rows)}


BENCHMARK = Benchmark(
    name="kills",
    rounds=20,
    settings={"steps": STEPS, "checkpoint_every": EVERY, "kills": KILLS, "limit_s": LIMIT_S},
    contenders=[
        Contender(key=kind, label=label, module="evenstep", job={}, names={"kind": kind})
        for kind, label in KINDS.items()
    ],
    measure=disturbed,
    tables=tables,
)
