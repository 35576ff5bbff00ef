"""Trains a small model again and again, with random faults, on random devices, in one process.

Every training has the same batches and must end with the same fingerprint. Faults come at random
moments: an objective that raises, a loss that is NaN, a device that is lost, Ctrl-C, a disk that is
full, a checkpoint that is damaged, a trainer that is left and loaded again on other devices.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import fresh
from evenstep.bench.tables import Table
from evenstep.checkpoint.files import list_checkpoints
from evenstep.errors import CheckpointError, DeviceLostError, NonFiniteLossError, SaveError

STEPS, FAULTS_PER_STEP = 30, 0.25
LAYOUTS = ("cpu:0", "cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2", "cpu:0:own,cpu:1:own", "cpu:0,cpu:1:own")
STEP_FAULTS = ("error", "nan", "lost", "interrupt")
FAULTS = (*STEP_FAULTS, "full disk", "damaged checkpoint", "other devices")
HOME = "evenstep cpu:0"  # the lane of the device that holds the model
FIRST_S = 30  # the process has its usual size after this
BATCHES = [
    (torch.randn(24, 1, 8, 8, generator=generator), torch.arange(24) % 5)
    for generator in [torch.Generator().manual_seed(0)]
    for _ in range(STEPS)
]


class FaultError(Exception):
    """What an objective of this soak raises."""


class Plan:
    """Which fault the next step has; read by the objective in every lane."""

    def __init__(self) -> None:
        self.fault = ""

    def objective(
        self, model: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Return the loss of a shard, or fail as planned."""
        fault = self.fault
        if fault == "error" and float(x[0, 0, 0, 0]) > 0:  # in about half of the shards
            raise FaultError
        if fault == "lost" and not threading.current_thread().name.startswith(HOME):
            raise DeviceLostError("the device is gone")
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        return (loss * torch.nan if fault == "nan" else loss), len(y)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model with an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.3), nn.Linear(144, 5)),
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(plan: Plan, folder: Path, seen: Counter[str]) -> str:
    """Train to the last step, whatever happens; return the fingerprint."""
    trainer = evenstep.Trainer(*make(), objective=plan.objective, **_layout(plan, seen))
    while True:
        with trainer:
            if _steps(trainer, plan, folder, seen):
                return trainer.fingerprint()
        trainer = _load(plan, folder, seen)


def _layout(plan: Plan, seen: Counter[str]) -> dict[str, Any]:
    faulty = seen is not _NONE
    names = random.choice(LAYOUTS).split(",") if faulty else ["cpu:0"]
    return {"devices": names, "max_in_flight": random.choice((1, 2)) if faulty else 1}


def _steps(trainer: evenstep.Trainer, plan: Plan, folder: Path, seen: Counter[str]) -> bool:
    """Take steps until the last one; return False to go on with another trainer."""
    while trainer.steps_done < STEPS:
        is_faulty = seen is not _NONE and random.random() < FAULTS_PER_STEP
        fault = random.choice(FAULTS) if is_faulty else ""
        if fault:
            seen[fault] += 1
        if fault in STEP_FAULTS:
            _faulty_step(trainer, plan, fault)
        elif fault == "full disk":
            with _no_room(), contextlib.suppress(SaveError):
                trainer.save(folder)
        elif fault:
            trainer.save(folder)
            if fault == "damaged checkpoint":
                trainer.step(*BATCHES[trainer.steps_done])
                _damage(trainer.save(folder))
            return False
        else:
            trainer.step(*BATCHES[trainer.steps_done])
    trainer.waitall()
    return trainer.steps_done == STEPS


def _faulty_step(trainer: evenstep.Trainer, plan: Plan, fault: str) -> None:
    trainer.waitall()
    if fault == "interrupt":
        return _interrupted(lambda: trainer.step(*BATCHES[trainer.steps_done]))
    plan.fault = fault
    try:
        with contextlib.suppress(FaultError, NonFiniteLossError):
            if fault != "lost" or len(trainer.devices) > 1:
                trainer.step(*BATCHES[trainer.steps_done])
            trainer.waitall()
    finally:
        plan.fault = ""
    return None


def _interrupted(step: Callable[[], object]) -> None:
    """Take a step, and send Ctrl-C at a random moment of it."""
    main, after_s = threading.get_ident(), random.random() * 0.01

    def send() -> None:
        time.sleep(after_s)
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send)
    with contextlib.suppress(KeyboardInterrupt):
        sender.start()
        step()
        sender.join()
        time.sleep(0)
    sender.join()


@contextlib.contextmanager
def _no_room() -> Iterator[None]:
    """Let no file grow beyond a few bytes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _damage(checkpoint: Path) -> None:
    file = random.choice([path for path in checkpoint.iterdir() if path.is_file()])
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def _load(plan: Plan, folder: Path, seen: Counter[str]) -> evenstep.Trainer:
    """Return a trainer that resumes from the newest checkpoint that is not damaged."""
    for checkpoint in reversed(list_checkpoints(folder)):
        layout = _layout(plan, seen)
        with contextlib.suppress(CheckpointError):
            return evenstep.Trainer.load(checkpoint, *make(), objective=plan.objective, **layout)
    raise RuntimeError("every checkpoint was refused")


_NONE = Counter[str]()  # of a training without faults


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many trainings ended as they should, and what the process held meanwhile."""
    logging.getLogger("evenstep").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan, seen, trainings, same = Plan(), Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as place:
        expected = train(plan, Path(place), _NONE)
    began, early = time.monotonic(), dict[str, int]()
    while time.monotonic() - began < job["seconds"]:
        with tempfile.TemporaryDirectory() as place:
            same += train(plan, Path(place), seen) == expected
        trainings += 1
        if not early and time.monotonic() - began > FIRST_S:
            early = held()
    return {
        "trainings": trainings,
        "same": same,
        "faults": {name: seen[name] for name in FAULTS},
        "held_early": early or held(),
        "held_late": held(),
    }


def held() -> dict[str, int]:
    """Return what this process holds: MiB of memory, threads, open files, files in /dev/shm."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_MiB": pages * resource.getpagesize() >> 20,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "shared_memory": len(os.listdir("/dev/shm")),
    }


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of what came of the trainings, and of what the process held."""
    runs = document["runs"]
    if not runs:
        return {}
    trainings, same = (sum(run[key] for run in runs) for key in ("trainings", "same"))
    faults = [[name, str(sum(run["faults"][name] for run in runs))] for name in FAULTS]
    rows = [["trainings", str(trainings)], ["of these with the expected fingerprint", str(same)]]
    most = max(runs, key=_growth)
    names = {"memory_MiB": "memory, MiB", "threads": "threads", "files": "open files"}
    names["shared_memory"] = "files in /dev/shm"
    growth = [
        [label, str(most["held_early"][key]), str(most["held_late"][key])]
        for key, label in names.items()
    ]
    head = ("held by the process that grew most", f"after {FIRST_S} s", "at the end")
    return {
        "faults": Table(("", "count"), [*rows, *([f"fault: {n}", c] for n, c in faults)]),
        "held": Table(head, growth),
    }


def _growth(run: Mapping[str, Any]) -> int:
    return int(run["held_late"]["memory_MiB"] - run["held_early"]["memory_MiB"])


SECONDS = 120
BENCHMARK = Benchmark(
    name="soak",
    rounds=30,
    settings={"seconds": SECONDS, "steps": STEPS},
    contenders=[script("soak", "soak", {"seconds": SECONDS}, label="soak")],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
