"""How many copies of the parameters a training with AdamW holds at its peak, beside its estimate.

The peak is that of the first process: what it needs above its memory without a model, in sizes of
the parameters, after a training of a small model, which loads libraries. Malloc returns freed
memory at once. Memory of other processes that a process reads counts, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import evenstep
from benchmark import ALLOCATORS, Benchmark, Contender, column, script
from evenstep.bench import lineup, machine, summarise
from evenstep.bench.tables import NOTHING, Table, cells, number
from evenstep.devices import find_devices
from evenstep.options.memory import peak_nbytes, sizes_of

SETTINGS = {"layers": 24, "width": 2048, "steps": 4}
SMALL = {"layers": 2, "width": 64}
WITHIN = 0.1
"""How much of the estimate the peak may differ from it."""

ONE, TWO, OWN = ["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1:own"]
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "a plain loop": {"by": "plain"},
    "DDP, two processes": {"by": "ddp", "processes": 2},
    "one device, V = 1": {"devices": ONE, "shards": 1},
    "one device, V = 8": {"devices": ONE, "shards": 8},
    "one device, V = 32": {"devices": ONE, "shards": 32},
    "two devices, V = 8": {"devices": TWO, "shards": 8},
    "two devices, V = 32": {"devices": TWO, "shards": 32},
    "two devices, one with memory of its own": {"devices": OWN, "shards": 8},
    "the same, owners": {"devices": OWN, "shards": 8, "owners": True},
    "two steps in flight": {"devices": ONE, "shards": 8, "in_flight": 2},
    "two steps in flight, two devices": {"devices": TWO, "shards": 8, "in_flight": 2},
    "two processes": {"devices": ONE, "shards": 8, "processes": 2},
    "two processes, owners": {"devices": ONE, "shards": 8, "processes": 2, "owners": True},
}


def measure(job: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the peak in copies of the parameters, and its estimate if evenstep trains."""
    torch.set_num_threads(1)
    if job.get("by") == "ddp":
        distributed.init_process_group(backend="gloo")
    _train({**job, **SMALL})
    before = machine.resident_bytes()
    nbytes, estimate = _train(job)
    peak = machine.peak_memory_bytes() - before
    if job.get("by") == "ddp":
        distributed.destroy_process_group()
    found = {"copies": peak / nbytes}
    if estimate:
        found["estimate"] = estimate / nbytes
    return found if os.environ.get("RANK", "0") == "0" else None


def _train(job: Mapping[str, Any]) -> tuple[int, int]:
    """Train; return the bytes of the parameters, and what the peak is estimated to be."""
    torch.manual_seed(0)
    width, shards = job["width"], job.get("shards", 8)
    layers = [nn.Linear(width, width, bias=False) for _ in range(job["layers"])]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    del layers
    optimizer, loss = torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss()
    batch = torch.randn(2 * shards, width), torch.randint(10, (2 * shards,))
    sizes = sizes_of([*model.parameters()], optimizer)
    if "by" in job:
        wrapped = DistributedDataParallel(model) if job["by"] == "ddp" else model
        for _ in range(job["steps"]):
            optimizer.zero_grad()
            loss(wrapped(batch[0]), batch[1]).backward()
            optimizer.step()
        return sizes.parameters, 0
    owners = job.get("owners", False)
    divide = {"divide": evenstep.Owners()} if owners else {}
    options: dict[str, Any] = {
        "devices": job["devices"],
        "shards": shards,
        "layout": evenstep.Layout(tune_malloc=False, **divide),
        "max_in_flight": job.get("in_flight", 1),
    }
    with evenstep.Trainer(model, optimizer, loss, **options) as trainer:
        for _ in range(job["steps"]):
            trainer.step(*batch)
        trainer.waitall()
    memories = [device.memory for device in find_devices(job["devices"])]
    more = {"processes": job.get("processes", 1), "owners": owners}
    return sizes.parameters, sum(peak_nbytes(sizes, shards, memories, **more))


def contender(layout: str) -> Contender:
    """Return a training in one layout."""
    job = {**LAYOUTS[layout], **SETTINGS}
    more: dict[str, Any] = {"environment": ALLOCATORS["gives_back"]}
    if job.get("processes", 1) > 1:
        more |= {"launcher": lineup.torchrun(job["processes"]), "threads": 1}
    key = layout.replace(" ", "_").replace(",", "").replace("_=_", "")
    return script("copies", key, job, names={"layout": layout}, **more)


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of peaks."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        copies = column(runs, "copies")
        estimates = [run["estimate"] for run in runs if "estimate" in run]
        estimate = verdict = NOTHING
        if estimates:
            expected = summarise(estimates).median
            differs = abs(summarise(copies).median / expected - 1)
            estimate = number(expected)
            verdict = "within 10%" if differs <= WITHIN else "**not within 10%**"
        rows.append([one.names["layout"], *cells(copies), estimate, verdict])
    return {"copies": Table(("layout", "copies", "spread", "estimate", "verdict"), rows)}


BENCHMARK = Benchmark(
    name="copies",
    rounds=3,
    settings=SETTINGS,
    contenders=[*map(contender, LAYOUTS)],
    tables=tables,
)
