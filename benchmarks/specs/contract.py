"""What the check of the contract costs, in the first step and in steps 2, 4, 8, ...: V = 8."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import fresh
from evenstep.bench.tables import Table, cells


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of the first check, of a later one, and of a step without one."""
    torch.manual_seed(0)
    model: nn.Module = getattr(evenstep.models, job["network"])()
    batch = torch.randn(job["batch"], 1, 28, 28), torch.arange(job["batch"]) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps_s: dict[bool, list[float]] = {True: [], False: []}  # by whether a step is checked
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=job["devices"]
    ) as trainer:
        trainer.step(*batch)
        for number in range(2, 2 + job["steps"]):
            began_s = time.perf_counter()
            trainer.step(*batch)
            steps_s[number.bit_count() == 1].append(time.perf_counter() - began_s)
        assert trainer.contract is not None
        check_s = trainer.contract.seconds
    plain_s = statistics.median(steps_s[False])
    again_s = statistics.median(steps_s[True]) - plain_s
    return {"check_ms": 1e3 * check_s, "again_ms": 1e3 * again_s, "step_ms": 1e3 * plain_s}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of checks."""
    rows = []
    for one in BENCHMARK.contenders:
        if runs := one.runs(document):
            columns = [[run[key] for run in runs] for key in ("check_ms", "again_ms", "step_ms")]
            shares = [(run["check_ms"] + _LATER * run["again_ms"]) / run["step_ms"] for run in runs]
            spelled = [cells(column, "{:.0f}".format)[0] for column in columns]
            percents = [100 * share / _STEPS for share in shares]
            rows.append([one.label, *spelled, *cells(percents, "{:.2f} %".format)])
    head = (
        "network", "first check, ms", "a later check, ms", "a step, ms", "of 1,000 steps", "spread"
    )  # fmt: skip
    return {"checks": Table(head, rows)}


_STEPS = 1000
_LATER = 9  # steps 2, 4, 8, ..., 512

BENCHMARK = Benchmark(
    name="self_check",
    contenders=[
        script(
            "contract",
            f"{network}.{devices}",
            {"network": network, "batch": batch, "steps": steps, "devices": devices},
            label=f"{label}, {devices} {'device' if devices == 1 else 'devices'}",
        )
        for network, label, batch, steps in (
            ("lenet", "LeNet, batch 256", 256, 31),
            ("resnet18", "ResNet-18, batch 64", 64, 8),
        )
        for devices in (1, 2)
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
