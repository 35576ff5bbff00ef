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
from benchmark import Benchmark, column, script
from evenstep.bench import machine
from evenstep.bench.tables import Table
from evenstep.checkpoint.files import list_checkpoints
from evenstep.errors import CheckpointError, DeviceLostError, NonFiniteLossError, SaveError

SECONDS, STEPS, FAULTS_PER_STEP = 120, 30, 0.25
LAYOUTS = ("cpu:0", "cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2", "cpu:0:own,cpu:1:own", "cpu:0,cpu:1:own")
STEP_FAULTS = ("error", "nan", "lost", "interrupt")
FAULTS = (*STEP_FAULTS, "full disk", "damaged checkpoint", "other devices")
HOME = "evenstep cpu:0"  # the lane of the device that holds the model
FIRST_S = 30  # the process has its usual size after this
HELD = {
    "memory_MiB": "memory, MiB",
    "threads": "threads",
    "files": "open files",
    "shared_memory": "files in /dev/shm",
}
BATCHES = [
    (torch.randn(24, 1, 8, 8, generator=generator), torch.arange(24) % 5)
    for generator in [torch.Generator().manual_seed(0)]
    for _ in range(STEPS)
]


class FaultError(Exception):
    """What an objective of this soak raises."""


class Soak:
    """A training that goes on to its last step, whatever happens.

    Args:
        folder: for its checkpoints.
        seen: counts the faults; None for a training without.
    """

    def __init__(self, folder: Path, seen: Counter[str] | None = None) -> None:
        self.folder, self.seen = folder, seen
        self.fault = ""  # of the next step; read by the objective in every lane

    def run(self) -> str:
        """Train to the last step; return the fingerprint."""
        trainer = evenstep.Trainer(*_make(), objective=self._objective, **self._layout())
        while True:
            with trainer:
                if self._reaches_the_end(trainer):
                    return trainer.fingerprint()
            trainer = self._loaded()

    def _objective(
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

    def _layout(self) -> dict[str, Any]:
        if self.seen is None:
            return {"devices": ["cpu:0"]}
        devices = random.choice(LAYOUTS).split(",")
        return {"devices": devices, "max_in_flight": random.choice((1, 2))}

    def _reaches_the_end(self, trainer: evenstep.Trainer) -> bool:
        """Take steps until the last one; return False to go on with another trainer."""
        while trainer.steps_done < STEPS:
            fault = ""
            if self.seen is not None and random.random() < FAULTS_PER_STEP:
                fault = random.choice(FAULTS)
                self.seen[fault] += 1
            if fault in STEP_FAULTS:
                self._faulty_step(trainer, fault)
            elif fault == "full disk":
                with _no_room(), contextlib.suppress(SaveError):
                    trainer.save(self.folder)
            elif fault:
                trainer.save(self.folder)
                if fault == "damaged checkpoint":
                    _step(trainer)
                    _damage(trainer.save(self.folder))
                return False
            else:
                _step(trainer)
        trainer.waitall()
        return trainer.steps_done == STEPS

    def _faulty_step(self, trainer: evenstep.Trainer, fault: str) -> None:
        trainer.waitall()
        if fault == "interrupt":
            _interrupted(lambda: _step(trainer))
            return
        self.fault = fault
        try:
            with contextlib.suppress(FaultError, NonFiniteLossError):
                if fault != "lost" or len(trainer.devices) > 1:
                    _step(trainer)
                trainer.waitall()
        finally:
            self.fault = ""

    def _loaded(self) -> evenstep.Trainer:
        """Return a trainer that resumes from the newest checkpoint that is not damaged."""
        for checkpoint in reversed(list_checkpoints(self.folder)):
            options = {"objective": self._objective, **self._layout()}
            with contextlib.suppress(CheckpointError):
                return evenstep.Trainer.load(checkpoint, *_make(), **options)
        raise RuntimeError("every checkpoint was refused")


def _make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    convolution = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(*convolution, nn.Dropout(0.3), nn.Linear(144, 5))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def _step(trainer: evenstep.Trainer) -> None:
    trainer.step(*BATCHES[trainer.steps_done])


def _interrupted(step: Callable[[], object]) -> None:
    """Take a step, and send Ctrl-C at a random moment of it."""
    main, after_s = threading.get_ident(), random.random() * 0.01
    sender = threading.Timer(after_s, lambda: signal.pthread_kill(main, signal.SIGINT))
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


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many trainings ended as they should, and what the process held meanwhile."""
    logging.getLogger("evenstep").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen, trainings, same = Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as place:
        expected = Soak(Path(place)).run()
    began, early = time.monotonic(), dict[str, int]()
    while time.monotonic() - began < job["seconds"]:
        with tempfile.TemporaryDirectory() as place:
            same += Soak(Path(place), seen).run() == expected
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
    folders = ("/proc/self/task", "/proc/self/fd", "/dev/shm")
    counts = [machine.resident_bytes() >> 20, *(len(os.listdir(folder)) for folder in folders)]
    return dict(zip(HELD, counts, strict=True))


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of what came of the trainings, and of what the process held."""
    runs = document["runs"]
    if not runs:
        return {}
    trainings, same = (sum(column(runs, key)) for key in ("trainings", "same"))
    rows = [["trainings", str(trainings)], ["of these with the expected fingerprint", str(same)]]
    rows += [[f"fault: {name}", str(sum(run["faults"][name] for run in runs))] for name in FAULTS]
    most = max(runs, key=_growth)
    growth = [
        [label, str(most["held_early"][key]), str(most["held_late"][key])]
        for key, label in HELD.items()
    ]
    head = ("held by the process that grew most", f"after {FIRST_S} s", "at the end")
    return {"faults": Table(("", "count"), rows), "held": Table(head, growth)}


def _growth(run: Mapping[str, Any]) -> int:
    return int(run["held_late"]["memory_MiB"] - run["held_early"]["memory_MiB"])


BENCHMARK = Benchmark(
    name="soak",
    rounds=30,
    settings={"seconds": SECONDS, "steps": STEPS},
    contenders=[script("soak", "soak", {"seconds": SECONDS}, "soak")],
    tables=tables,
)
