"""A network in two equal stages on two devices: how long the devices are idle in a step.

A pipeline of S equal stages and V shards is idle for (S − 1) / (V + S − 1) of the time between its
first shard's begin and its last shard's end (Huang et al., GPipe, 2019, arXiv:1811.06965). Beside
it, the same training on one device, and on two that each compute all of the network. "wait" has
layers that wait a fixed time instead of computing: what is left is the order of the turns and what
changing them costs, without the noise of the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import fresh
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import Table, cells, number, verdict
from evenstep.profiling.trace import Span

SETTINGS = {"width": 512, "layers": 8, "examples_of_a_shard": 128, "warmup_steps": 3, "steps": 12}
STAGES = 2
SHARDS = (4, 8, 16)
LAYOUTS = {
    "one": {"devices": 1},
    "data": {"devices": STAGES},
    "stages": {"devices": STAGES, "stages": f"balanced:{STAGES}"},
    "wait": {"devices": STAGES, "stages": f"balanced:{STAGES}"},
}
LABELS = {
    "one": "one device",
    "data": "two devices, by data",
    "stages": "two devices, by stages",
    "wait": "by stages, waiting instead of computing",
}
WAIT_S = 2e-3  # of a layer forward; twice as long backward


class Wait(torch.autograd.Function):
    """The tensor itself, after a while."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Wait once."""
        time.sleep(WAIT_S)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Wait twice as long."""
        time.sleep(2 * WAIT_S)
        return gradients[0]


class Waiting(nn.Module):
    """A layer that scales its input, and takes a fixed time for it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, width) to (n, width)."""
        scaled: torch.Tensor = Wait.apply(x * self.scale)  # type: ignore[no-untyped-call]
        return scaled


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of steps, the idle share of each, a timeline, and the fingerprint."""
    torch.manual_seed(0)
    width, shards, layout = job["width"], job["shards"], LAYOUTS[job["layout"]]
    waits = job["layout"] == "wait"
    width = 1 if waits else width
    model = nn.Sequential(
        *(
            Waiting() if waits else nn.Sequential(nn.Linear(width, width), nn.ReLU())
            for _ in range(job["layers"])
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(2, shards * job["examples_of_a_shard"], width)
    with evenstep.Trainer(model, optimizer, nn.MSELoss(), shards=shards, **layout) as trainer:
        for _ in range(job["warmup_steps"]):
            trainer.step(*batch)
        times_s = []
        for _ in range(job["steps"]):
            began_s = time.perf_counter()
            trainer.step(*batch)
            times_s.append(time.perf_counter() - began_s)
        steps = [_spans(trainer.trace.spans, step) for step in range(job["warmup_steps"], 99)]
        idle = [_idle(spans, layout["devices"]) for spans in steps if spans]
        usual = min((spans for spans in steps if spans), key=lambda one: abs(
            _idle(one, layout["devices"]) - statistics.median(idle)))  # fmt: skip
        return {
            "step_ms": 1e3 * statistics.median(times_s),
            "idle": statistics.median(idle),
            "timeline": _timeline(usual) if "stages" in layout else [],
            "fingerprint": trainer.fingerprint(),
        }


def _spans(spans: Sequence[Span], step: int) -> list[Span]:
    """Return the shards' spans of a step."""
    return [
        one
        for one in spans
        if one.category == "compute" and one.story and one.story.get("step") == step
    ]


def _idle(spans: Sequence[Span], devices: int) -> float:
    """Return the share of the devices' time that they are idle, from first begin to last end."""
    began_s, ended_s = min(one.began_s for one in spans), max(one.ended_s for one in spans)
    busy_s = sum(one.ended_s - one.began_s for one in spans)
    return 1 - busy_s / (devices * (ended_s - began_s))


def _timeline(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the visits of a step, as `evenstep.bench.pictures.draw_stages` takes them."""
    origin_s = min(one.began_s for one in spans)
    return [
        {
            "shard": (one.story or {})["shard"],
            "stage": (one.story or {})["stage"],
            "backward": (one.story or {})["backward"],
            "began_s": one.began_s - origin_s,
            "ended_s": one.ended_s - origin_s,
        }
        for one in spans
    ]


def theory(shards: int) -> float:
    """Return the idle share of equal stages."""
    return (STAGES - 1) / (shards + STAGES - 1)


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of steps, and the idle shares beside what theory says."""
    runs: list[Run] = document["runs"]
    rows = []
    for shards in SHARDS:
        for layout, label in LABELS.items():
            own = select(runs, part=f"{layout}.{shards}")
            if own:
                is_staged = "stages" in LAYOUTS[layout]
                idle = [run["idle"] for run in own]
                excess = [one / theory(shards) for one in idle] if is_staged else []
                rows.append(
                    [
                        str(shards),
                        label,
                        *cells([run["step_ms"] for run in own]),
                        f"{statistics.median(idle):.1%}",
                        f"{theory(shards):.1%}" if is_staged else "–",
                        number(statistics.median(excess)) if is_staged else "–",
                        verdict(excess, at_most=1.1)[1] if is_staged else "–",
                    ]
                )
    head = ("V", "layout", "ms a step", "spread", "idle", "in theory", "ratio", "≤ 1.1")
    return {"idle": Table(head, rows, 2)}


BENCHMARK = Benchmark(
    name="stages",
    settings=SETTINGS,
    contenders=[
        script(
            "stages",
            f"{layout}.{shards}",
            {**SETTINGS, "layout": layout, "shards": shards},
            names={"part": f"{layout}.{shards}"},
        )
        for shards in SHARDS
        for layout in LAYOUTS
    ],
    tables=tables,
    rounds=3,
)

if __name__ == "__main__":
    fresh.answer(measure)
