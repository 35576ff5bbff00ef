"""What saving costs a training: ResNet-18 with momentum, on two devices.

`"save"` is "never", "waiting" (training waits until the checkpoint is on the disk) or "background".
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, column, cpus, script
from evenstep.bench.tables import Table, cells, median

SETTINGS = {"batch": 64, "warmup_steps": 2, "steps": 12, "every": 4}
LABELS = {
    "never": "without saving",
    "waiting": "`save(folder)`: on the disk when it returns",
    "background": "`save(folder, background=True)`: written while training continues",
}


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds per step and of each call of `save`."""
    torch.manual_seed(0)
    model = evenstep.models.resnet18(10)
    batch = torch.randn(job["batch"], 1, 28, 28), torch.arange(job["batch"]) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=cpus(2))
    saves_ms = []
    with tempfile.TemporaryDirectory() as folder, trainer:
        for _ in range(job["warmup_steps"]):
            trainer.step(*batch)
        began_s = time.perf_counter()
        for step in range(job["steps"]):
            trainer.step(*batch)
            if job["save"] != "never" and step % job["every"] == 0:
                saving_s = time.perf_counter()
                trainer.save(folder, background=job["save"] == "background")
                saves_ms.append(1e3 * (time.perf_counter() - saving_s))
        trainer.wait_for_save()
        seconds = time.perf_counter() - began_s
    return {"step_ms": 1e3 * seconds / job["steps"], "saves_ms": saves_ms}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of saves."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        saves = [ms for run in runs for ms in run["saves_ms"]]
        rows.append([one.label, *cells(saves), median(column(runs, "step_ms"))])
    head = ("training", "ms until `save` returns", "spread", "ms per step, including saves")
    return {"saves": Table(head, rows)}


BENCHMARK = Benchmark(
    name="checkpoints",
    settings=SETTINGS,
    contenders=[
        script("checkpoints", key, {"save": key, **SETTINGS}, label)
        for key, label in LABELS.items()
    ],
    tables=tables,
)
