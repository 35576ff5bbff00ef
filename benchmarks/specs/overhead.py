"""Overhead of a step: an empty model of one scalar parameter, V = 8, on 1 and 2 devices.

`"devices": 0` is a plain loop over the same shards without evenstep: forward, backward, and the
gradients that torch sums, divided and applied. `"inline": true` uses lanes without threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import fresh, summarise
from evenstep.bench.tables import Table, cells, verdict
from evenstep.engine import InlineLanes, ThreadLanes

LEARNING_RATE = 0.01


class Scalar(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n,) to (n,)."""
        return x * self.factor


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return median and percentiles of the milliseconds of a step."""
    shards, model = job["shards"], Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = torch.zeros(shards)
    if job["devices"] == 0:
        torch.set_num_threads(1)
        times_ms = _time_each(job, lambda: _plain_step(model, optimizer, batch, shards))
    else:
        devices = [f"cpu:{number}" for number in range(job["devices"])]
        lanes = InlineLanes if job["inline"] else ThreadLanes
        with evenstep.Trainer(
            model, optimizer, objective=_objective, devices=devices, shards=shards, lanes=lanes
        ) as trainer:
            times_ms = _time_each(job, lambda: trainer.step(batch))
    tenths = statistics.quantiles(times_ms, n=10)
    return {
        "median_ms": statistics.median(times_ms),
        "tenth_ms": tenths[0],
        "ninetieth_ms": tenths[-1],
    }


def _objective(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).sum(), len(x)


def _plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, shards: int
) -> None:
    for x in batch.tensor_split(shards):
        model(x).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(len(batch))
    optimizer.step()
    optimizer.zero_grad()


def _time_each(job: Mapping[str, Any], step: Callable[[], object]) -> list[float]:
    times_ms = []
    for _ in range(job["warmup_steps"] + job["steps"]):
        began = time.perf_counter()
        step()
        times_ms.append(1e3 * (time.perf_counter() - began))
    return times_ms[job["warmup_steps"] :]


TARGET_MS = 0.7
TARGETED = "2"  # devices, each with a thread of its own
SETTINGS = {"shards": 8, "warmup_steps": 200, "steps": 3000}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of steps."""

    def milliseconds(value: float) -> str:
        return f"{value:.3f}"

    rows = []
    for one in BENCHMARK.contenders:
        if runs := one.runs(document):
            steps = [run["median_ms"] for run in runs]
            ends = (summarise([run[f"{end}_ms"] for run in runs]) for end in ("tenth", "ninetieth"))
            inner = " to ".join(milliseconds(end.median) for end in ends)
            judged = verdict(steps, at_most=TARGET_MS if one.key == TARGETED else None)
            rows.append([one.label, *cells(steps, milliseconds), inner, *judged])
    head = ("step", "ms", "least to most run", "10% to 90% of the steps", "target", "verdict")
    return {"steps": Table(head, rows)}


BENCHMARK = Benchmark(
    name="step_overhead",
    settings=SETTINGS,
    contenders=[
        script("overhead", key, {**SETTINGS, "devices": devices, "inline": inline}, label=label)
        for key, label, devices, inline in (
            ("plain", "plain loop over the shards", 0, False),
            ("1", "evenstep, 1 device", 1, False),
            ("2", "evenstep, 2 devices", 2, False),
            ("2.inline", "evenstep, 2 devices, their lanes in one thread", 2, True),
        )
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
