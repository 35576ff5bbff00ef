"""Where the time of a step goes: torch's profiler on one core, whole batches against shards.

It shows what smaller shards cost in torch's own operators, with and without evenstep, and what
evenstep adds between them. The methods: "whole" is a plain loop, "shards" one that accumulates over
the shards, "evenstep" the trainer with inline lanes (they do the work of one device in this thread,
so that the profiler sees all of it), "hybridized" the same with compiled shards. One round, since
these are shares and not a race. malloc keeps freed memory: otherwise page faults would count for
whichever operator comes next.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import evenstep
from benchmark import ALLOCATORS, Benchmark, Contender, script
from evenstep.bench import workload
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import NOTHING, Table
from evenstep.bench.workload import Job, each_ms
from evenstep.bench.workload.job import Step
from evenstep.engine import InlineLanes

NETWORKS = {"lenet": "LeNet", "resnet18": "ResNet-18"}
METHODS = {
    ("whole", 1): "whole",
    ("shards", 2): "plain, V = 2",
    ("shards", 8): "plain, V = 8",
    ("evenstep", 2): "evenstep, V = 2",
    ("evenstep", 8): "evenstep, V = 8",
    ("hybridized", 8): "hybridized, V = 8",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lenet": {"examples": 256, "warmup_steps": 5, "steps": 30},
    "resnet18": {"examples": 64, "warmup_steps": 1, "steps": 5},
}
SHOWN = 12
MOST_LETTERS = 48  # what fits a table beside seven numbers


def measure(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's milliseconds, and those of each operator in itself: medians over the steps.

    Every step has its own profile. In a longer one the growing list of events displaces freed
    activations in the heap, and the page faults of their new place would be measured.
    """
    torch.set_num_threads(1)
    job = Job(**{name: value for name, value in fields.items() if name != "way"})
    profiled_ms, operators = [], []
    with _opened(job, fields["way"]) as step:
        batches = workload.in_memory(workload.make_loader(job))
        steps_ms = each_ms(lambda: step(*next(batches)), job.steps, job.warmup_steps)
        for _ in range(job.steps):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                profiled_ms += each_ms(lambda: step(*next(batches)), 1)
            events = profiler.key_averages()
            operators.append({event.key: event.self_cpu_time_total / 1e3 for event in events})
    return {
        "step_ms": statistics.median(steps_ms),
        "profiled_step_ms": statistics.median(profiled_ms),
        "operators_ms": {
            name: statistics.median(one.get(name, 0.0) for one in operators)
            for name in sorted(set().union(*operators))
        },
        "all_operators_ms": statistics.median(sum(one.values()) for one in operators),
    }


@contextlib.contextmanager
def _opened(job: Job, method: str) -> Iterator[Step]:
    """Return the step of a trainer, or of a plain loop."""
    model = workload.make_network(job)
    optimizer = workload.make_optimizer(job, model)
    if method not in ("evenstep", "hybridized"):
        model = model.to(memory_format=torch.channels_last)
        yield _plain_step(model, optimizer, job.shards if method == "shards" else 1)
        return
    from torch._inductor import config  # slow to import

    config.cpp.enable_kernel_profile = True
    experiment = evenstep.Experiment(
        shards=job.shards, compile=method == "hybridized", memory_format="channels_last"
    )
    layout = evenstep.Layout(lanes=InlineLanes)
    given = model, optimizer, torch.nn.CrossEntropyLoss()
    with evenstep.Trainer(*given, devices=1, experiment=experiment, layout=layout) as trainer:
        yield trainer.step


def _plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, shards: int) -> Step:
    """Return the step of a plain loop that accumulates the gradients of `shards` shards."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        for x, y in zip(images.tensor_split(shards), labels.tensor_split(shards), strict=True):
            x = x.to(memory_format=torch.channels_last)
            (F.cross_entropy(model(x), y, reduction="sum") / len(images)).backward()
        optimizer.step()

    return step


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return a table of operators for each network."""
    found = {}
    for network, title in NETWORKS.items():
        if runs := select(document["runs"], network=network):
            examples = document["settings"][network]["examples"]
            methods = (METHODS[run["way"], run["shards"]] for run in runs)
            found[network] = Table((f"{title}, {examples} examples", *methods), _rows(runs))
    return found


def _rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return the operators that take most in any of the runs, the largest first, and their sums."""
    names = set().union(*(run["operators_ms"] for run in runs))
    most = {name: max(run["operators_ms"].get(name, 0.0) for run in runs) for name in names}
    largest = sorted(names, key=lambda name: (-most[name], name))[:SHOWN]
    shown: list[tuple[str, list[float | None]]] = [
        (f"`{_shortened(name)}`", [run["operators_ms"].get(name) for run in runs])
        for name in largest
    ]
    shown += [
        ("all operators", [run["all_operators_ms"] for run in runs]),
        ("between", [run["profiled_step_ms"] - run["all_operators_ms"] for run in runs]),
        ("step, not profiled", [run["step_ms"] for run in runs]),
    ]
    return [[name, *(NOTHING if ms is None else f"{ms:.1f}" for ms in row)] for name, row in shown]


def _shortened(name: str) -> str:
    """Return the name of an operator; compiled ones list everything that they fuse."""
    if len(name) <= MOST_LETTERS:
        return name
    kept = (MOST_LETTERS - 3) // 2  # at either end: names of kernels begin alike
    return f"{name[:kept]}...{name[-kept:]}"


def _contender(network: str, method: str, shards: int) -> Contender:
    names = {"network": network, "way": method, "shards": shards}
    more = {"names": names, "environment": ALLOCATORS["keeps"]}
    return script("profile", f"{network}.{method}.{shards}", {**names, **SETTINGS[network]}, **more)


BENCHMARK = Benchmark(
    name="step_profile",
    rounds=1,
    settings=SETTINGS,
    contenders=[_contender(network, *cut) for network in NETWORKS for cut in METHODS],
    tables=tables,
)
