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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, Contender, column, script
from evenstep.bench import lineup, machine
from evenstep.bench.rounds import Run
from evenstep.bench.tables import NOTHING, Table, cells, median, verdict
from evenstep.bench.workload import each_ms
from evenstep.profiling.trace import Span
from evenstep.stages.plan import stages_of
from evenstep.stages.turns import TurnOrder

SETTINGS = {"width": 512, "layers": 8, "examples_of_a_shard": 128, "warmup_steps": 3, "steps": 12}
STAGES = 2
SHARDS = (4, 8, 16)
_BALANCED = {"layout": evenstep.Layout(divide=evenstep.Stages(f"balanced:{STAGES}"))}
LAYOUTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one": ("one device", {"devices": 1}),
    "data": ("two devices, by data", {"devices": STAGES}),
    "stages": ("two devices, by stages", {"devices": STAGES, **_BALANCED}),
    "wait": ("by stages, waiting instead of computing", {"devices": STAGES, **_BALANCED}),
}
BLOCKS = {"blocks": 12, "block_width": 512, "memory_steps": 2}
OWN = {"devices": ["cpu:0:own", "cpu:1:own"]}
BY_STAGES = evenstep.Layout(divide=evenstep.Stages("balanced"))
BY_OWNERS = evenstep.Layout(divide=evenstep.Owners())
BY_BOTH = evenstep.Layout(divide=(evenstep.Stages("balanced"), evenstep.Owners()))
MEMORY: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "one": ("one device", 1, {"devices": 1}),
    "data": ("two devices with memory of their own, by data", 1, OWN),
    "own": ("the same two, by stages", 1, {**OWN, "layout": BY_STAGES}),
    "shared": ("two devices that share memory, by stages", 1, {"devices": 2, "layout": BY_STAGES}),
    "processes": ("two processes", 2, {"devices": 1}),
    "owners": ("two processes, with owners", 2, {"devices": 1, "layout": BY_OWNERS}),
    "both": (
        "two processes, with owners, each by stages", 2, {"devices": 2, "layout": BY_BOTH},
    ),
}  # fmt: skip
"""Layouts whose memory is measured: label, processes, and options of the trainer."""

WAIT_S = 2e-3  # of a layer forward; twice as long backward
Timeline = Sequence[Mapping[str, Any]]


class Wait(torch.autograd.Function):
    """The tensor itself, after a while; backward, after twice as long."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(WAIT_S)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * WAIT_S)
        return gradients[0]


class Scale(nn.Module):
    """Multiplies (n, width) by a number that is learned, and may take a fixed time for it."""

    def __init__(self, *, waits: bool = False) -> None:
        super().__init__()
        self.scale, self.waits = nn.Parameter(torch.ones(1)), waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = x * self.scale
        return Wait.apply(scaled) if self.waits else scaled


def measure(job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the figures of a layout's times, or of its memory."""
    return measure_memory(job) if "blocks" in job else measure_idle(job)


def measure_memory(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the peak of a process, and what each device holds, in the first process."""
    _, _, options = MEMORY[job["layout"]]
    before, width = machine.resident_bytes(), job["block_width"]
    torch.manual_seed(0)
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
    parameters, held = [*model.parameters()], defaultdict[int, int](int)
    of_parameter: Sequence[int] = [0] * len(parameters)
    if trainer.stages:
        count = 1 + max(trainer.stages.values())
        of_parameter = stages_of(model, trainer.stages, count).of_parameter
    for stage, parameter in zip(of_parameter, parameters, strict=True):
        tensors = [parameter, parameter.grad, *state.get(parameter, {}).values()]
        held[stage] += sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
    return [held[stage] for stage in sorted(held)]


def measure_idle(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of steps, the idle share of each, a timeline, and the fingerprint."""
    torch.manual_seed(0)
    shards, (_, layout) = job["shards"], LAYOUTS[job["layout"]]
    waits = job["layout"] == "wait"
    width = 1 if waits else job["width"]
    layers: list[nn.Module] = [Scale(waits=True) for _ in range(job["layers"])]
    if not waits:
        firsts = [Scale(), *(nn.Identity() for _ in layers[1:])]
        layers = [nn.Sequential(one, nn.Linear(width, width), nn.ReLU()) for one in firsts]
    model = nn.Sequential(*layers)
    given = model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss()
    batch = torch.randn(2, shards * job["examples_of_a_shard"], width)
    first, count = job["warmup_steps"], job["steps"]
    with evenstep.Trainer(*given, shards=shards, **layout) as trainer:
        times_ms = each_ms(lambda: trainer.step(*batch), count, first)
        steps = [_spans(trainer.trace.spans, step) for step in range(first, first + count)]
        idle = {_idle(spans, layout["devices"]): spans for spans in steps if spans}
        usual = idle[statistics.median_low(idle)]
        return {
            "step_ms": statistics.median(times_ms),
            "idle": statistics.median(idle),
            "timeline": _timeline(usual) if "layout" in layout else [],
            "fingerprint": trainer.fingerprint(),
        }


def _spans(spans: Sequence[Span], step: int) -> list[Span]:
    """Return the shards' spans of a step."""
    computed = (one for one in spans if one.category == "compute")
    return [one for one in computed if one.story and one.story.get("step") == step]


def _idle(spans: Sequence[Span], devices: int) -> float:
    """Return the share of the devices' time that they are idle, from first begin to last end."""
    began_s, ended_s = min(one.began_s for one in spans), max(one.ended_s for one in spans)
    busy_s = sum(one.ended_s - one.began_s for one in spans)
    return 1 - busy_s / (devices * (ended_s - began_s))


def _timeline(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the visits of a step, as `evenstep.bench.pictures.draw_stages` takes them."""
    origin_s = min(one.began_s for one in spans)
    found = []
    for one in spans:
        visit = {name: (one.story or {})[name] for name in ("shard", "stage", "backward")}
        times = {"began_s": one.began_s - origin_s, "ended_s": one.ended_s - origin_s}
        found.append({**visit, **times})
    return found


def theory(shards: int) -> float:
    """Return the idle share of equal stages."""
    return (STAGES - 1) / (shards + STAGES - 1)


def _times_of_kinds(timeline: Timeline) -> dict[tuple[int, bool], list[float]]:
    """Return the seconds of visits by their kind, which is a stage with a direction."""
    times = defaultdict[tuple[int, bool], list[float]](list)
    for one in timeline:
        times[one["stage"], one["backward"]].append(one["ended_s"] - one["began_s"])
    return times


def scheduled_idle(timeline: Timeline) -> float:
    """Return the idle share of the same order of turns, if each visit took the mean of its kind.

    What the measured share has beyond it is lost between visits, and by visits that take longer
    than others of their kind. What it has beyond the theory is due to unequal stages.
    """
    times = _times_of_kinds(timeline)
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


def changing_idle(timeline: Timeline) -> float:
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


def variation(timeline: Timeline) -> float:
    """Return the standard deviation of the visits of a kind over their mean; mean of the kinds."""
    kinds = _times_of_kinds(timeline).values()
    return statistics.mean(statistics.pstdev(own) / statistics.mean(own) for own in kinds)


SHARES: tuple[Callable[[Timeline], float], ...] = (scheduled_idle, changing_idle, variation)
HEAD = (
    *("V", "layout", "ms a step", "spread", "idle", "by its stages' times", "between visits"),
    *("visits vary by", "in theory", "ratio", "≤ 1.1"),
)
MEMORY_HEAD = (
    *("layout", "a device holds, MiB", "of the whole, at most", "its share"),
    *("peak of a process, bytes a parameter", "spread"),
)


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of steps, the idle shares beside what theory says, and the memory."""
    idle, held = [], []
    for one, runs in BENCHMARK.measured(document):
        if "blocks" in one.job:
            held.append(_memory_row(one, runs))
        else:
            idle.append(_idle_row(one, runs))
    return {"idle": Table(HEAD, idle, 2), "memory": Table(MEMORY_HEAD, held, 1)}


def _idle_row(one: Contender, runs: list[Run]) -> list[str]:
    shards, idle, percent = one.job["shards"], column(runs, "idle"), "{:.1%}".format
    row = [str(shards), one.label, *cells(column(runs, "step_ms")), median(idle, percent)]
    if "layout" not in LAYOUTS[one.job["layout"]][1]:
        return [*row, *[NOTHING] * 6]
    shares = (median([share(run["timeline"]) for run in runs], percent) for share in SHARES)
    excess = [one / theory(shards) for one in idle]
    judged = verdict(excess, at_most=1.1)[1]
    return [*row, *shares, percent(theory(shards)), median(excess), judged]


def _memory_row(one: Contender, runs: list[Run]) -> list[str]:
    label, processes, _ = MEMORY[one.job["layout"]]
    held, whole = runs[0]["held_bytes"], 16 * runs[0]["parameters"]
    divided = "owners" in label
    share = NOTHING if divided or processes > 1 else f"{1 / len(held):.1%}"
    return [
        label,
        ", ".join(f"{one / 2**20:,.0f}" for one in held),
        NOTHING if divided else f"{max(held) / whole:.1%}",
        share,
        *cells([run["peak_bytes"] / run["parameters"] for run in runs]),
    ]


def _contender(part: str, job: Mapping[str, Any], label: str, processes: int = 1) -> Contender:
    launcher = lineup.torchrun(processes) if processes > 1 else ()
    return script("stages", part, job, label, names={"part": part}, launcher=launcher)


BENCHMARK = Benchmark(
    name="stages",
    settings={**SETTINGS, **BLOCKS},
    contenders=[
        *(
            _contender(f"{name}.{count}", {**SETTINGS, "layout": name, "shards": count}, label)
            for count in SHARDS
            for name, (label, _) in LAYOUTS.items()
        ),
        *(
            _contender(f"memory.{name}", {**BLOCKS, "layout": name}, label, processes)
            for name, (label, processes, _) in MEMORY.items()
        ),
    ],
    tables=tables,
    rounds=3,
)
