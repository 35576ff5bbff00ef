"""Kills one of two training processes, again and again, and checks the result.

Each run is `evenstep train --processes 2` with restarts and checkpoints. "worker" kills (SIGKILL)
one of the two processes after a random step was saved; "writer" kills the process that saves while
it writes a checkpoint. A run has recovered if it ends by itself, leaves no process behind, and has
the fingerprint of an undisturbed run in one process.
"""

from __future__ import annotations

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
from evenstep.cli.record import TrainRecord

STEPS, EVERY = 600, 20
LIMIT_S = 180
TRAIN = ("train", "--model", "mlp", "--data", "digits", "--momentum", "0.9", "--steps", str(STEPS))
KINDS = {
    "worker": "any process, after a random step was saved",
    "writer": "the process that saves, in the middle of a checkpoint",
}


def _start(file: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evenstep", *TRAIN, "--devices", "1", "--json", str(file), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _fingerprint(file: Path) -> str | None:
    return TrainRecord.from_json(file.read_text()).fingerprint if file.exists() else None


@functools.cache
def undisturbed() -> str | None:
    """Return the fingerprint of one process on one device that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        _start(Path(folder) / "record.json").communicate()
        return _fingerprint(Path(folder) / "record.json")


def disturbed(contender: Contender) -> dict[str, Any]:
    """Train once, kill a process, and return how the training ended."""
    expected = undisturbed()
    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place) / "kept", Path(place) / "record.json"
        saving = ("--checkpoint-dir", str(folder), "--checkpoint-every", str(EVERY))
        began = time.monotonic()
        process = _start(file, "--processes", "2", "--max-restarts", "3", *saving)
        killed = kill(process, folder, contender.key)
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            errors = "it did not end"
        return {
            **killed,
            "seconds": round(time.monotonic() - began, 2),
            "same": expected is not None and _fingerprint(file) == expected,
            "left": [pid for pid in killed["workers"] if _is_alive(pid)],
            "exit_code": process.returncode,
            "errors": errors[-300:] if process.returncode else "",
        }


def kill(process: subprocess.Popen[str], folder: Path, kind: str) -> dict[str, Any]:
    """Wait for a random step, and for a write of the first worker; then kill a worker."""
    most = STEPS - EVERY if kind == "worker" else STEPS // 2
    rank = random.randrange(2) if kind == "worker" else 0
    step = random.randrange(0, most, EVERY)
    _wait(process, lambda: any(_saved_step(path) >= step for path in list_checkpoints(folder)))
    if kind == "writer":
        _wait(process, lambda: any(folder.glob(".step-*writing-*")))
    children = _read(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = [int(child) for child in children.split()]
    victims = [
        pid for pid in workers if f"RANK={rank}" in _read(f"/proc/{pid}/environ").split("\0")
    ]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    return {"step": step, "rank": rank, "killed": len(victims), "workers": workers}


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
            well = sum(run["same"] and not run["left"] and run["killed"] == 1 for run in runs)
            seconds = cells([run["seconds"] for run in runs])
            rows.append([one.label, str(len(runs)), str(well), *seconds])
    head = ("killed", "runs", "recovered", "seconds from start to end", "spread")
    return {"kills": Table(head, rows)}


BENCHMARK = Benchmark(
    name="kills",
    rounds=20,
    settings={"steps": STEPS, "checkpoint_every": EVERY, "processes": 2, "limit_s": LIMIT_S},
    contenders=[
        Contender(key=kind, label=label, module="evenstep", job={}, names={"kind": kind})
        for kind, label in KINDS.items()
    ],
    measure=disturbed,
    tables=tables,
)
