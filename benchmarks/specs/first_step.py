"""Opening a trainer and its first step, for models of many small parts; and what a trace takes."""

from __future__ import annotations

import compileall
import contextlib
import gc
import statistics
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, column, script
from evenstep.bench.tables import Table, cells, median, verdict
from evenstep.bench.workload import each_ms
from evenstep.errors import counted
from evenstep.profiling.clock import NodeTime, ShardTime, StepClock, Timekeeper
from evenstep.profiling.trace import Trace

EXAMPLES, CLASSES, OPENED = 64, 10, 5
STEPS = 12  # after the first one; those with a later check are left out
CHECKED = (2, 4, 8)
ALLOWED_STEPS, ALLOWED_MS = 4, 300.0  # of a first step
MOST_MS = {"first": 200.0, "open": 30.0}  # of opening


class LSTM(nn.Module):
    """An LSTM written by hand, over 28 rows of 28 numbers."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(28 + hidden, hidden) for _ in range(4)])
        self.head = nn.Linear(hidden, CLASSES)
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(len(x), self.hidden)
        for row in x.unbind(1):
            i, f, o, g = (gate(torch.cat((row, h), 1)) for gate in self.inner)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


class Tensors(nn.Module):
    """Adds thousands of small parameters."""

    def __init__(self, count: int = 5000) -> None:
        super().__init__()
        self.terms = nn.ParameterList([torch.full((CLASSES,), 0.01) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for term in self.terms:
            x = x + term
        return x


class Transformer(nn.Module):
    """Twenty-four narrow encoder layers over 28 rows of 28 numbers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.inner = nn.Linear(28, width)
        self.layers = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.inner(x)).mean(1))


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(CLASSES, CLASSES) for _ in range(1000)])


MODELS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...], int]] = {
    "lstm": ("an LSTM written by hand", LSTM, (28, 28), 8),
    "layers": ("1,000 layers", _layers, (CLASSES,), 8),
    "tensors": ("5,000 tensors", Tensors, (CLASSES,), 1),
    "transformer": ("a transformer of 24 narrow layers", Transformer, (28, 28), 8),
}


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of opening, of the first step, and of an ordinary one."""
    torch.manual_seed(0)
    _, make, shape, shards = MODELS[job["model"]]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(EXAMPLES, *shape), torch.arange(EXAMPLES) % CLASSES
    given = model, optimizer, nn.CrossEntropyLoss()

    def open_and_close() -> None:
        evenstep.Trainer(*given, devices=1, shards=shards).open().close()

    opened_ms = each_ms(open_and_close, 1 + OPENED)
    with evenstep.Trainer(*given, devices=1, shards=shards) as trainer:
        first_ms, *later_ms = each_ms(lambda: float(trainer.step(*batch)), 1 + STEPS)
    plain_ms = [ms for step, ms in enumerate(later_ms, 2) if step not in CHECKED]
    return {
        "opened_first_ms": opened_ms[0],
        "opened_ms": statistics.median(opened_ms[1:]),
        "first_ms": first_ms,
        "step_ms": statistics.median(plain_ms),
    }


def trace_of_steps(steps: int = 6500) -> dict[str, int]:
    """Return the bytes and objects that a full trace of steps of eight shards takes."""
    trace = Trace(["cpu:0", "cpu:1"])
    timekeeper = Timekeeper(trace, trace.rows)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    for number in range(steps):
        shards = [ShardTime(shard % 2, shard, False, 1.0, 2.0) for shard in range(8)]
        nodes = [NodeTime(0, 0, 2, 1.0, 2.0)] * 4
        timekeeper.ended.append((number, StepClock(1.0, shards, nodes, (0, 2.0, 3.0))))
        timekeeper.add_up()
    gc.collect()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    spans = len(trace.spans)
    return {"bytes": nbytes, "objects": len(gc.get_objects()) - objects, "spans": spans}


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Compile evenstep's modules to bytecode, as pip does when it installs them."""
    compileall.compile_dir(Path(evenstep.__file__).parent, quiet=2)
    yield


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of first steps, of opening, and of the trace."""
    steps, opening = [], []
    for one, runs in BENCHMARK.measured(document):
        first, step = (column(runs, f"{name}_ms") for name in ("first", "step"))
        ratios = [(ms - ALLOWED_MS) / each for ms, each in zip(first, step, strict=True)]
        times = [median(ms, "{:.0f}".format) for ms in (step, first)]
        judged = verdict(ratios, at_most=ALLOWED_STEPS, spell="{}×".format)
        steps.append([one.label, *times, *cells(ratios, unit="×"), *judged])
        for name, key in (("first", "opened_first_ms"), ("open", "opened_ms")):
            label = f"{one.label}, {'the first in a process' if name == 'first' else 'later ones'}"
            taken = column(runs, key)
            judged = verdict(taken, at_most=MOST_MS[name], spell="{:.0f}".format)
            opening.append([label, *cells(taken, "{:.1f}".format), *judged])
    trace = document.get("trace", {})
    rows = [
        [label, f"{trace[name]:,}", *verdict([trace[name]], at_most=most, spell="{:,}".format)]
        for name, label, most in (
            ("spans", "spans", None),
            ("bytes", "bytes", 5_000_000),
            ("objects", "objects that the garbage collector visits", 1000),
        )
        if name in trace
    ]
    end = ("target", "verdict")
    head = ("model", "a step, ms", "first step, ms", "(first step - 0.3 s) / a step", "spread")
    return {
        "steps": Table((*head, *end), steps),
        "opening": Table(("model", "opening, ms", "spread", *end), opening),
        "trace": Table(("a full trace", "now", *end), rows),
    }


BENCHMARK = Benchmark(
    name="first_step",
    place=compiled,
    fields=lambda: {"trace": trace_of_steps()},
    contenders=[
        script("first_step", key, {"model": key}, f"{label}, {counted(shards, 'shard')}")
        for key, (label, _, _, shards) in MODELS.items()
    ],
    tables=tables,
)
