"""A large embedding: a step beside a plain loop's and DDP's, and the peak of memory.

The plain loop takes the whole batch at once; another accumulates over the same eight shards, so it
costs what V does without evenstep. The peak is what the training needs above the model,
in sizes of the table, after a training of a small table in the same process, which loads libraries.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import evenstep
from benchmark import Benchmark, Contender, cpus, script
from evenstep.bench import lineup, machine, paired_ratios
from evenstep.bench.rounds import by_round, summarise
from evenstep.bench.tables import Table, cells, median, number, verdict
from evenstep.bench.workload import each_ms

SETTINGS = {"rows": 1_000_000, "width": 16, "lookups": 8, "shards": 8, "steps": 30, "warmup": 5}
SMALL = {"rows": 1000, "steps": 2, "warmup": 0}
TRAINED_BY = {
    "plain": "a plain loop",
    "shards": "a plain loop over eight shards",
    "ddp": "DDP, two processes",
    "evenstep.1": "evenstep, one device",
    "evenstep.2": "evenstep, two devices",
}
GROUPS = ("dense.sgd.256", "dense.adam.256", "sparse.sgd.256", "sparse.sgd.2048")
OVER_PLAIN = {"dense": 1.5, "sparse": 3.0}
TABLES_MORE = 1.05
"""Targets: a step's time over that of the plain loop, and the memory above its peak, in tables.

One table is what the check of the first step copies; the rest is the interpreter's.
"""

Step = Callable[[torch.Tensor, torch.Tensor], object]


class Words(nn.Module):
    """Looks words up, and classifies their mean."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(job["rows"], job["width"], sparse=job["gradients"] == "sparse")
        self.head = nn.Linear(job["width"], 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores (n, 10) of ids (n, lookups)."""
        scores: torch.Tensor = self.head(self.table(ids).mean(1))
        return scores


def measure(job: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the median milliseconds of a step, and the peak in sizes of the table."""
    torch.set_num_threads(1)
    if job["by"] == "ddp":
        distributed.init_process_group(backend="gloo")
    _train({**job, **SMALL})
    times_ms, before = _train(job)
    peak = machine.peak_memory_bytes() - before
    if job["by"] == "ddp":
        distributed.destroy_process_group()
    found = {"ms": statistics.median(times_ms), "peak": peak / (4 * job["rows"] * job["width"])}
    return found if os.environ.get("RANK", "0") == "0" else None


def _train(job: Mapping[str, Any]) -> tuple[list[float], int]:
    """Train, and return the milliseconds of each step, and the memory with the model alone."""
    torch.manual_seed(0)
    model = Words(job)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[job["optimizer"]](model.parameters(), lr=0.01)
    size = job["examples"] // int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    ids = torch.randint(job["rows"], (size, job["lookups"]), generator=generator)
    labels = torch.randint(10, (size,), generator=generator)
    before = machine.resident_bytes()
    with _step(job, model, optimizer) as step:
        return each_ms(lambda: step(ids, labels), job["steps"], job["warmup"]), before


@contextlib.contextmanager
def _step(
    job: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Step]:
    kind, _, devices = job["by"].partition(".")
    loss = nn.CrossEntropyLoss()
    if kind == "evenstep":
        options = {"devices": cpus(int(devices)), "shards": job["shards"]}
        with evenstep.Trainer(model, optimizer, loss, **options) as trainer:
            yield trainer.step
        return
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model

    cuts = job["shards"] if kind == "shards" else 1

    def step(ids: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        for some, their_labels in zip(ids.chunk(cuts), labels.chunk(cuts), strict=True):
            (loss(wrapped(some), their_labels) / cuts).backward()
        optimizer.step()

    yield step


def contender(group: str, by: str) -> Contender:
    """Return a training of a group."""
    gradients, optimizer, examples = group.split(".")
    names = {"gradients": gradients, "optimizer": optimizer, "examples": int(examples)}
    more: dict[str, Any] = {"launcher": lineup.torchrun(2), "threads": 1} if by == "ddp" else {}
    return script("embeddings", f"{group}.{by}", {"by": by, **names, **SETTINGS}, **more)


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of times, and that of memory."""
    runs, times, peaks = document["runs"], [], []
    for group in GROUPS:
        gradients, optimizer, examples = group.split(".")
        plain = {what: by_round(runs, what, variant=f"{group}.plain") for what in ("ms", "peak")}
        for by, label in TRAINED_BY.items():
            own = {what: by_round(runs, what, variant=f"{group}.{by}") for what in ("ms", "peak")}
            if not own["ms"]:
                continue
            names = [gradients, optimizer, examples, label]
            is_ours = by.startswith("evenstep")
            ratios = paired_ratios(own["ms"], plain["ms"])
            at_most = OVER_PLAIN[gradients] if is_ours else None
            judged = verdict(ratios, at_most=at_most)
            found = median(own["ms"].values()), *cells(ratios, unit="×")
            times.append([*names, *found, *judged])
            most = None
            if is_ours and plain["peak"]:
                most = summarise([*plain["peak"].values()]).median + TABLES_MORE
            judged = verdict(own["peak"].values(), at_most=most, spell=number)
            peaks.append([*names, *cells(own["peak"].values()), *judged])
    names = ("gradients", "optimizer", "examples", "trained by")
    head = (*names, "a step, ms", "over plain", "spread", "target", "verdict")
    heads = (*names, "peak, tables", "spread", "target", "verdict")
    return {"times": Table(head, times, 4), "peaks": Table(heads, peaks, 4)}


BENCHMARK = Benchmark(
    name="embeddings",
    settings=SETTINGS,
    contenders=[contender(group, by) for group in GROUPS for by in TRAINED_BY],
    tables=tables,
)
