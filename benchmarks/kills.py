"""Kill one of two training processes, again and again, and see what comes of it.

    python benchmarks/kills.py --runs 20

Each run is `evenstep train --processes 2` with restarts and checkpoints. "worker": any of the two
is killed (SIGKILL) once a random step is saved. "writer": the one that saves is killed while it
writes a checkpoint. A run is well when it ends by itself with the fingerprint of one undisturbed
process, and no process is left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstep.checkpoint.files import list_checkpoints
from evenstep.cli.record import TrainRecord
from records import RESULTS, Record

STEPS, EVERY = 600, 20
TRAIN = ("train", "--model", "mlp", "--data", "digits", "--momentum", "0.9", "--steps", str(STEPS))
LIMIT_S = 180
KINDS = ("worker", "writer")


def main() -> None:
    """Run, write the file, print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "kills.json")
    options = parser.parse_args()
    settings = {"steps": STEPS, "checkpoint_every": EVERY, "processes": 2, "limit_s": LIMIT_S}
    record = Record("kills", options.out, settings=settings)
    expected = undisturbed()
    for number in range(options.runs):
        for kind in KINDS:
            run = disturbed(kind, random.Random(f"{kind} {number}"), expected)
            record.add({"run": number, "kind": kind, **run})
            print(number, kind, run, file=sys.stderr)
    for kind in KINDS:
        runs = [run for run in record.document["runs"] if run["kind"] == kind]
        well = sum(run["same"] and not run["left"] for run in runs)
        print(f"{kind}: {well} of {len(runs)} ended with the undisturbed fingerprint")


def undisturbed() -> str:
    """Return the fingerprint of one process on one device that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        command = [sys.executable, "-m", "evenstep", *TRAIN, "--devices", "1", "--json", str(file)]
        subprocess.run(command, check=True, capture_output=True)
        return TrainRecord.from_json(file.read_text()).fingerprint


def disturbed(kind: str, chance: random.Random, expected: str) -> dict[str, Any]:
    """Do one run, and say what came of it."""
    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place) / "kept", Path(place) / "record.json"
        options = ["--processes", "2", "--max-restarts", "3", "--devices", "1", "--json", str(file)]
        saving = ["--checkpoint-dir", str(folder), "--checkpoint-every", str(EVERY)]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "evenstep", *TRAIN, *options, *saving],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        killed = DISTURB[kind](process, folder, chance)
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            errors = "it did not end"
        record = TrainRecord.from_json(file.read_text()) if file.exists() else None
        return {
            **killed,
            "seconds": round(time.monotonic() - began, 2),
            "same": record is not None and record.fingerprint == expected,
            "left": [pid for pid in killed["workers"] if _is_alive(pid)],
            "exit_code": process.returncode,
            "errors": errors[-300:] if process.returncode else "",
        }


def kill_a_worker(
    process: subprocess.Popen[str], folder: Path, chance: random.Random
) -> dict[str, Any]:
    """Kill any worker once a random step is saved."""
    rank, step = chance.randrange(2), chance.randrange(0, STEPS - EVERY, EVERY)
    _wait(process, lambda: any(_step(path) >= step for path in list_checkpoints(folder)))
    return _kill(process, rank)


def kill_the_writer(
    process: subprocess.Popen[str], folder: Path, chance: random.Random
) -> dict[str, Any]:
    """Kill the first worker while it writes a checkpoint of a random step or a later one."""
    step = chance.randrange(0, STEPS // 2, EVERY)
    _wait(process, lambda: any(_step(path) >= step for path in list_checkpoints(folder)))
    _wait(process, lambda: any(folder.glob(".step-*writing-*")))
    return _kill(process, 0)


DISTURB: dict[str, Callable[..., dict[str, Any]]] = {
    "worker": kill_a_worker,
    "writer": kill_the_writer,
}


def _kill(process: subprocess.Popen[str], rank: int) -> dict[str, Any]:
    workers = _children(process.pid)
    victims = [pid for pid in workers if f"RANK={rank}" in _environment(pid)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    return {"rank": rank, "killed": len(victims), "workers": workers}


def _wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-").removesuffix(".old"))


def _children(pid: int) -> list[int]:
    try:
        told = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in told.split()]


def _environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
