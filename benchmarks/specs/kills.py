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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmark import Benchmark
from evenstep.bench import Contender
from evenstep.bench.tables import Table, cells
from evenstep.checkpoint.files import list_checkpoints
from evenstep.cli.training.record import TrainRecord

STEPS, EVERY, KILLS = 600, 20, 10
LIMIT_S, TIMEOUT_S = 240, 5  # processes start one after the other on a loaded machine
TRAIN = ("train", "--model", "mlp", "--data", "digits", "--momentum", "0.9", "--steps", str(STEPS))
KINDS = {
    "worker": "any process, after a random step was saved",
    "writer": "the process that saves, in the middle of a checkpoint",
    "all": "all processes, after a random step was saved; started again on other devices",
    "stopped": "any process: stopped, not killed, for longer than the other one waits",
}
LAYOUTS = (  # of "all": CPU devices, with and without memory of their own, in one process or two
    ("--devices", "1"),
    ("--devices", "2", "--in-flight", "2"),
    ("--devices", "3"),
    ("--devices", "cpu:0:own,cpu:1:own", "--in-flight", "2"),
    ("--processes", "2", "--devices", "1"),
    ("--processes", "2", "--devices", "2", "--in-flight", "2"),
)


def _start(file: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", *TRAIN, "--json", str(file), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _fingerprint(file: Path) -> str | None:
    return TrainRecord.from_json(file.read_text()).fingerprint if file.exists() else None


@functools.cache
def undisturbed() -> str | None:
    """Return the fingerprint of one process on one device that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        _start(Path(folder) / "record.json", "--devices", "1").communicate()
        return _fingerprint(Path(folder) / "record.json")


def disturbed(contender: Contender) -> dict[str, Any]:
    """Train once with `KILLS` kills, and return how the training ended."""
    expected, kind = undisturbed(), contender.key
    last = STEPS - EVERY if kind != "writer" else STEPS - 3 * EVERY
    steps = sorted(random.sample(range(0, last, EVERY), KILLS))
    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place) / "kept", Path(place) / "record.json"
        saving = ("--checkpoint-dir", str(folder), "--checkpoint-every", str(EVERY))
        restarts = ("--processes", "2", "--devices", "1", "--max-restarts", str(2 * KILLS))
        restarts += ("--timeout", str(TIMEOUT_S)) if kind == "stopped" else ()

        def start() -> subprocess.Popen[str]:
            if kind == "all":
                return _start(file, *saving, "--auto-resume", *random.choice(LAYOUTS))
            return _start(file, *saving, *restarts)

        began = time.monotonic()
        process, killed, seen = start(), 0, set[int]()
        for step in steps:
            workers = _wait_for(process, folder, kind, step)
            seen.update(workers)
            how = signal.SIGSTOP if kind == "stopped" else signal.SIGKILL
            killed += send(how, workers if kind == "all" else workers[:1])
            if kind == "stopped":
                time.sleep(2 * TIMEOUT_S)
                send(signal.SIGCONT, workers[:1])
                _wait(process, functools.partial(_are_gone, workers))
            if kind == "all":
                process.communicate()
                process = start()
        errors = _end(process)
        return {
            "seconds": round(time.monotonic() - began, 2),
            "killed": killed,
            "same": expected is not None and _fingerprint(file) == expected,
            "left": [pid for pid in seen if _is_alive(pid)],
            "exit_code": process.returncode,
            "errors": errors[-300:] if process.returncode else "",
        }


def send(what: signal.Signals, pids: list[int]) -> int:
    """Send a signal to processes; return 1 if the first one got it, 0 if it had ended before."""
    reached = [pid for pid in pids if _is_alive(pid)]
    for pid in reached:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)
    return int(reached[:1] == pids[:1] != [])


def _wait_for(process: subprocess.Popen[str], folder: Path, kind: str, step: int) -> list[int]:
    """Wait until `step` was saved, and for a write; return whom to kill, the victim first."""

    def is_reached() -> bool:
        return any(_saved_step(path) >= step for path in list_checkpoints(folder))

    _wait(process, lambda: is_reached() and (kind == "all" or len(_workers(process)) == 2))
    if kind == "all":
        return [*_workers(process), process.pid]
    if kind == "writer":
        _wait(process, lambda: any(folder.glob(".step-*writing-*")))
    rank = 0 if kind == "writer" else random.randrange(2)
    return sorted(_workers(process), key=lambda pid: _rank(pid) != rank)


def _end(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "it did not end"


def _workers(process: subprocess.Popen[str]) -> list[int]:
    children = _read(f"/proc/{process.pid}/task/{process.pid}/children")
    return [pid for pid in map(int, children.split()) if _rank(pid) >= 0]


def _are_gone(pids: list[int]) -> bool:
    return not any(map(_is_alive, pids))


def _rank(pid: int) -> int:
    """Return the rank of a worker; -1 for another process, or one that is gone."""
    found = [line for line in _read(f"/proc/{pid}/environ").split("\0") if line.startswith("RANK=")]
    return int(found[0].removeprefix("RANK=")) if found else -1


def _wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)


def _saved_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-").removesuffix(".old"))


def _is_alive(pid: int) -> bool:
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def _read(file: str) -> str:
    """Return the text of a file of /proc; "" if the process is gone."""
    try:
        return Path(file).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of kills."""
    rows = []
    for one in BENCHMARK.contenders:
        if runs := one.runs(document):
            well = sum(run["same"] and not run["left"] for run in runs)
            kills = sum(run["killed"] for run in runs)
            seconds = cells([run["seconds"] for run in runs])
            rows.append([one.label, str(kills), str(len(runs)), str(well), *seconds])
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
