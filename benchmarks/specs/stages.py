"""A network in two equal stages: how long its devices are idle in a step, and what they hold.

A pipeline of S equal stages and V shards is idle for (S − 1) / (V + S − 1) of the time between its
first shard's begin and its last shard's end (Huang et al., GPipe, 2019, arXiv:1811.06965). Beside
it, the same training on one device, and on two that each compute all of the network. "wait" has
layers that wait a fixed time instead of computing: what is left is the order of the turns and what
changing them costs, without the noise of the machine.

The stages are equal: a first layer multiplies the input by a parameter, so that the backward pass
of the first stage computes the gradient of its input, as that of the second one does.

Memory is counted tensor by tensor for each device, and measured as the peak of each process. CPU
devices share the memory of their process: there, only processes with owners hold less.
"""

from __future__ import annotations

import heapq
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import fresh, lineup, machine
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import NOTHING, Table, cells, number, verdict
from evenstep.profiling.trace import Span
from evenstep.stages.plan import stages_of
from evenstep.stages.turns import TurnOrder

SETTINGS = {"width": 512, "layers": 8, "examples_of_a_shard": 128, "warmup_steps": 3, "steps": 12}
STAGES = 2
SHARDS = (4, 8, 16)
_BALANCED = evenstep.Layout(divide=evenstep.Stages(f"balanced:{STAGES}"))
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "one": {"devices": 1},
    "data": {"devices": STAGES},
    "stages": {"devices": STAGES, "layout": _BALANCED},
    "wait": {"devices": STAGES, "layout": _BALANCED},
}
LABELS = {
    "one": "one device",
    "data": "two devices, by data",
    "stages": "two devices, by stages",
    "wait": "by stages, waiting instead of computing",
}
BLOCKS = {"blocks": 12, "block_width": 512, "memory_steps": 2}
OWN = ["cpu:0:own", "cpu:1:own"]
BY_STAGES = evenstep.Layout(divide=evenstep.Stages("balanced"))
BY_OWNERS = evenstep.Layout(divide=evenstep.Owners())
BY_BOTH = evenstep.Layout(divide=(evenstep.Stages("balanced"), evenstep.Owners()))
MEMORY: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "one": ("one device", 1, {"devices": 1}),
    "data": ("two devices with memory of their own, by data", 1, {"devices": OWN}),
    "own": ("the same two, by stages", 1, {"devices": OWN, "layout": BY_STAGES}),
    "shared": ("two devices that share memory, by stages", 1, {"devices": 2, "layout": BY_STAGES}),
    "processes": ("two processes", 2, {"devices": 1}),
    "owners": ("two processes, with owners", 2, {"devices": 1, "layout": BY_OWNERS}),
    "both": (
        "two processes, with owners, each by stages",
        2,
        {"devices": 2, "layout": BY_BOTH},
    ),
}
"""Layouts whose memory is measured: label, processes, and options of the trainer."""

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


class Scale(nn.Module):
    """Multiplies its input by a number that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, width) to (n, width)."""
        return x * self.scale


def measure(job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the figures of a layout's times, or of its memory."""
    return measure_memory(job) if "blocks" in job else measure_idle(job)


def measure_memory(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the peak of a process, and what each device holds, in the first process."""
    _, _, options = MEMORY[job["layout"]]
    before = machine.resident_bytes()
    torch.manual_seed(0)
    width = job["block_width"]
    block = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 8, **block) for _ in range(job["blocks"]))
    )
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(2, 16, 8, width)
    with evenstep.Trainer(model, optimizer, nn.MSELoss(), **options) as trainer:
        for _ in range(job["memory_steps"]):
            trainer.step(*batch)
        held = _held_bytes(trainer)
    if os.environ.get("RANK", "0") != "0":
        return None
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "held_bytes": held,
        "peak_bytes": machine.peak_memory_bytes() - before,
    }


def _held_bytes(trainer: evenstep.Trainer) -> list[int]:
    """Return the bytes of parameters, gradients and optimizer state of each stage."""
    model, state = trainer.model, trainer.optimizer.state
    of_parameter: Sequence[int] = [0] * sum(1 for _ in model.parameters())
    if trainer.stages:
        count = 1 + max(trainer.stages.values())
        of_parameter = stages_of(model, trainer.stages, count).of_parameter
    held: dict[int, int] = defaultdict(int)
    for stage, parameter in zip(of_parameter, model.parameters(), strict=True):
        tensors = [parameter, parameter.grad, *state.get(parameter, {}).values()]
        held[stage] += sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
    return [held[stage] for stage in sorted(held)]


def measure_idle(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of steps, the idle share of each, a timeline, and the fingerprint."""
    torch.manual_seed(0)
    width, shards, layout = job["width"], job["shards"], LAYOUTS[job["layout"]]
    waits = job["layout"] == "wait"
    width = 1 if waits else width
    model = nn.Sequential(
        *(
            Waiting()
            if waits
            else nn.Sequential(
                Scale() if not layer else nn.Identity(), nn.Linear(width, width), nn.ReLU()
            )
            for layer in range(job["layers"])
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
            "timeline": _timeline(usual) if "layout" in layout else [],
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


def scheduled_idle(timeline: Sequence[Mapping[str, Any]]) -> float:
    """Return the idle share of the same order of turns, if each visit took the mean of its kind.

    What the measured share has beyond it is lost between visits, and by visits that take longer
    than others of their kind. What it has beyond the theory is due to unequal stages.
    """
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for one in timeline:
        times[one["stage"], one["backward"]].append(one["ended_s"] - one["began_s"])
    seconds = {kind: statistics.mean(own) for kind, own in times.items()}
    shards = len(times[0, False])
    ways = [*((stage, False) for stage in range(STAGES))]
    ways += [(stage, True) for stage in reversed(range(STAGES))]
    order, waiting, place = TurnOrder(STAGES), list(range(STAGES, shards)), [0] * shards
    ends: list[tuple[float, int]] = []
    now_s = 0.0
    for shard in range(min(STAGES, shards)):
        order.ask(shard, 0, backward=False)
    while True:
        for shard in order.begin():
            heapq.heappush(ends, (now_s + seconds[ways[place[shard]]], shard))
        if not ends:
            return 1 - shards * sum(seconds.values()) / (STAGES * now_s)
        now_s, shard = heapq.heappop(ends)
        stage, backward = ways[place[shard]]
        place[shard] += 1
        if place[shard] == len(ways):
            order.end(shard)
            if waiting:
                order.ask(waiting.pop(0), 0, backward=False)
        elif ways[place[shard]][0] == stage:  # the last stage turns around
            heapq.heappush(ends, (now_s + seconds[ways[place[shard]]], shard))
        else:
            order.leave(shard, stage, holds=not backward)
            order.ask(shard, ways[place[shard]][0], backward=ways[place[shard]][1])


def changing_idle(timeline: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the devices' time between a visit and the next one, which could begin."""
    ends = {(one["shard"], one["stage"], one["backward"]): one["ended_s"] for one in timeline}
    changing_s = 0.0
    for stage in range(STAGES):
        visits = [one for one in timeline if one["stage"] == stage]
        for before, after in itertools.pairwise(sorted(visits, key=lambda one: one["began_s"])):
            turns = after["backward"] and stage == STAGES - 1  # its forward pass ends here
            came_from = stage if turns else stage + 1 if after["backward"] else stage - 1
            came_s = ends.get((after["shard"], came_from, after["backward"] and not turns), 0.0)
            changing_s += after["began_s"] - max(before["ended_s"], came_s)
    whole_s = max(ends.values()) - min(one["began_s"] for one in timeline)
    return changing_s / (STAGES * whole_s)


def variation(timeline: Sequence[Mapping[str, Any]]) -> float:
    """Return the standard deviation of the visits of one kind over their mean; mean of the kinds.

    A kind is a stage with a direction.
    """
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for one in timeline:
        times[one["stage"], one["backward"]].append(one["ended_s"] - one["began_s"])
    return statistics.mean(statistics.pstdev(own) / statistics.mean(own) for own in times.values())


def memory_table(runs: Sequence[Run]) -> Table:
    """Return what each device holds, and the peak of a process, for each layout."""
    rows = []
    for layout, (label, processes, _) in MEMORY.items():
        own = select(runs, part=f"memory.{layout}")
        if own:
            first, held = own[0], own[0]["held_bytes"]
            whole, share = 16 * first["parameters"], 1 / (processes * len(held))
            is_divided = "owners" in label
            rows.append(
                [
                    label,
                    ", ".join(f"{one / 2**20:,.0f}" for one in held),
                    NOTHING if is_divided else f"{max(held) / whole:.1%}",
                    NOTHING if is_divided or processes > 1 else f"{share:.1%}",
                    *cells([run["peak_bytes"] / run["parameters"] for run in own]),
                ]
            )
    head = (
        "layout",
        "a device holds, MiB",
        "of the whole, at most",
        "its share",
        "peak of a process, bytes a parameter",
        "spread",
    )
    return Table(head, rows, 1)


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of steps, the idle shares beside what theory says, and the memory."""
    runs: list[Run] = document["runs"]
    rows = []
    for shards in SHARDS:
        for layout, label in LABELS.items():
            own = select(runs, part=f"{layout}.{shards}")
            if own:
                is_staged = "layout" in LAYOUTS[layout]
                idle = [run["idle"] for run in own]
                excess = [one / theory(shards) for one in idle] if is_staged else []
                rows.append(
                    [
                        str(shards),
                        label,
                        *cells([run["step_ms"] for run in own]),
                        f"{statistics.median(idle):.1%}",
                        *(
                            f"{statistics.median(share(run['timeline']) for run in own):.1%}"
                            if is_staged
                            else NOTHING
                            for share in (scheduled_idle, changing_idle, variation)
                        ),
                        f"{theory(shards):.1%}" if is_staged else "–",
                        number(statistics.median(excess)) if is_staged else "–",
                        verdict(excess, at_most=1.1)[1] if is_staged else "–",
                    ]
                )
    head = (
        "V",
        "layout",
        "ms a step",
        "spread",
        "idle",
        "by its stages' times",
        "between visits",
        "visits vary by",
        "in theory",
        "ratio",
        "≤ 1.1",
    )
    return {"idle": Table(head, rows, 2), "memory": memory_table(runs)}


BENCHMARK = Benchmark(
    name="stages",
    settings={**SETTINGS, **BLOCKS},
    contenders=[
        *(
            script(
                "stages",
                f"{layout}.{shards}",
                {**SETTINGS, "layout": layout, "shards": shards},
                names={"part": f"{layout}.{shards}"},
            )
            for shards in SHARDS
            for layout in LAYOUTS
        ),
        *(
            script(
                "stages",
                f"memory.{layout}",
                {**BLOCKS, "layout": layout},
                names={"part": f"memory.{layout}"},
                launcher=lineup.torchrun(processes) if processes > 1 else (),
            )
            for layout, (_, processes, _) in MEMORY.items()
        ),
    ],
    tables=tables,
    rounds=3,
)

if __name__ == "__main__":
    fresh.answer(measure)
