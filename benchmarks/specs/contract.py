"""What the checks of the contract cost: LeNet and ResNet-18, V = 8, on one device and two."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, column, script
from evenstep.bench.tables import Table, cells, median, verdict
from evenstep.bench.workload import each_ms
from evenstep.errors import counted

SUMS, ORDERS = (2, 8, 32, 128, 512), (4, 16, 64, 256)
"""The steps with a later check of each kind, in a training of 1,000 steps."""
TRAINING = 1000
MEASURED = 16  # steps
NETWORKS = {"lenet": ("LeNet, batch 256", 256), "resnet18": ("ResNet-18, batch 64", 64)}


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of the first check, of all later ones, and of a step without one.

    A later check is what its step takes beyond the median of the steps without a check.
    """
    torch.manual_seed(0)
    model: nn.Module = getattr(evenstep.models, job["network"])()
    batch = torch.randn(job["batch"], 1, 28, 28), torch.arange(job["batch"]) % 10
    given = model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    with evenstep.Trainer(*given, devices=job["devices"]) as trainer:
        took_ms = dict(enumerate(each_ms(lambda: trainer.step(*batch), MEASURED), 1))
        assert trainer.contract is not None
        first_ms = 1e3 * trainer.contract.seconds
    checked = {1, *SUMS, *ORDERS}
    step_ms = statistics.median(ms for step, ms in took_ms.items() if step not in checked)
    later_ms = sum(
        len(kind) * statistics.mean(took_ms[step] - step_ms for step in kind if step in took_ms)
        for kind in (SUMS, ORDERS)
    )
    return {"first_ms": first_ms, "later_ms": later_ms, "step_ms": step_ms}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of checks, with their share of the time of 1,000 steps."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        step, first, later = (column(runs, f"{name}_ms") for name in ("step", "first", "later"))
        shares = [(run["first_ms"] + run["later_ms"]) / (TRAINING * run["step_ms"]) for run in runs]
        times = [median(ms, "{:.0f}".format) for ms in (step, first, later)]
        judged = verdict(shares, at_most=0.01, spell="{:.0%}".format)
        rows.append([one.label, *times, *cells(shares, "{:.2%}".format), *judged])
    head = ("network", "a step, ms", "first check, ms", "later checks, ms")
    return {"checks": Table((*head, "of 1,000 steps", "spread", "target", "verdict"), rows)}


BENCHMARK = Benchmark(
    name="self_check",
    contenders=[
        script(
            "contract",
            f"{network}.{devices}",
            {"network": network, "batch": batch, "devices": devices},
            f"{label}, {counted(devices, 'device')}",
        )
        for network, (label, batch) in NETWORKS.items()
        for devices in (1, 2)
    ],
    tables=tables,
)
