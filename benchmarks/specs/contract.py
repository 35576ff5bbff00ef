"""What the checks of the contract cost: LeNet and ResNet-18, V = 8, on one device and two."""

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
from evenstep.bench.tables import Table, cells, verdict
from evenstep.errors import counted

SUMS, ORDERS = (2, 8, 32, 128, 512), (4, 16, 64, 256)
"""The steps with a later check of each kind, in a training of 1,000 steps."""
TRAINING = 1000
MEASURED = 16  # steps


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of the first check, of all later ones, and of a step without one.

    A later check is what its step takes beyond the median of the steps without a check.
    """
    torch.manual_seed(0)
    model: nn.Module = getattr(evenstep.models, job["network"])()
    batch = torch.randn(job["batch"], 1, 28, 28), torch.arange(job["batch"]) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    took_ms = {}
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=job["devices"]
    ) as trainer:
        for step in range(1, MEASURED + 1):
            began_s = time.perf_counter()
            trainer.step(*batch)
            took_ms[step] = 1e3 * (time.perf_counter() - began_s)
        assert trainer.contract is not None
        first_ms = 1e3 * trainer.contract.seconds
    checked = {step: ms for step, ms in took_ms.items() if step in (*SUMS, *ORDERS)}
    step_ms = statistics.median(
        ms for step, ms in took_ms.items() if step > 1 and step not in checked
    )
    later_ms = sum(
        len(kind) * statistics.mean(checked[step] - step_ms for step in kind if step in checked)
        for kind in (SUMS, ORDERS)
    )
    return {"first_ms": first_ms, "later_ms": later_ms, "step_ms": step_ms}


def share(run: Mapping[str, float]) -> float:
    """Return the time of all checks over that of the steps, in a training of 1,000 steps."""
    return (run["first_ms"] + run["later_ms"]) / (TRAINING * run["step_ms"])


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of checks."""
    rows = []
    for one in BENCHMARK.contenders:
        if runs := one.runs(document):
            times = ([run[key] for run in runs] for key in ("step_ms", "first_ms", "later_ms"))
            shares = [share(run) for run in runs]
            spelled = [cells(ms, "{:.0f}".format)[0] for ms in times]
            judged = verdict(shares, at_most=0.01, spell="{:.0%}".format)
            rows.append([one.label, *spelled, *cells(shares, "{:.2%}".format), *judged])
    head = ("network", "a step, ms", "first check, ms", "later checks, ms")
    return {"checks": Table((*head, "of 1,000 steps", "spread", "target", "verdict"), rows)}


BENCHMARK = Benchmark(
    name="self_check",
    contenders=[
        script(
            "contract",
            f"{network}.{devices}",
            {"network": network, "batch": batch, "devices": devices},
            label=f"{label}, {counted(devices, 'device')}",
        )
        for network, label, batch in (
            ("lenet", "LeNet, batch 256", 256),
            ("resnet18", "ResNet-18, batch 64", 64),
        )
        for devices in (1, 2)
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
