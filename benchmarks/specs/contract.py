"""What the self-check of a training's first step costs: LeNet and ResNet-18, V = 8, one device."""

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
    """Return the milliseconds of the check, and of a step after it."""
    torch.manual_seed(0)
    model: nn.Module = getattr(evenstep.models, job["network"])()
    batch = torch.randn(job["batch"], 1, 28, 28), torch.arange(job["batch"]) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps_s = []
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=1) as trainer:
        trainer.step(*batch)
        for _ in range(job["steps"]):
            began_s = time.perf_counter()
            trainer.step(*batch)
            steps_s.append(time.perf_counter() - began_s)
        assert trainer.contract is not None
        check_s = trainer.contract.seconds
    return {"check_ms": 1e3 * check_s, "step_ms": 1e3 * statistics.median(steps_s)}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of checks."""
    rows = []
    for one in BENCHMARK.contenders:
        if runs := one.runs(document):
            checks, steps = ([run[key] for run in runs] for key in ("check_ms", "step_ms"))
            ratios = [check / step for check, step in zip(checks, steps, strict=True)]
            spelled = [*cells(checks, "{:.0f}".format), cells(steps, "{:.0f}".format)[0]]
            rows.append([one.label, *spelled, *cells(ratios, "{:.2f}".format)])
    head = ("network", "check, ms", "spread", "a step, ms", "check over a step", "spread of it")
    return {"checks": Table(head, rows)}


BENCHMARK = Benchmark(
    name="self_check",
    contenders=[
        script(
            "contract", network, {"network": network, "batch": batch, "steps": steps}, label=label
        )
        for network, label, batch, steps in (
            ("lenet", "LeNet, batch 256", 256, 20),
            ("resnet18", "ResNet-18, batch 64", 64, 3),
        )
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
