"""`partition="optimizer"`: the time of an update on two devices, and the bytes of a process.

The update of ResNet-18 with Adam, on one of two CPU devices or on both side by side: from the sum
of the gradients until the parameters are in every memory again. It includes the division of the
gradients, and for devices with memory of their own the copies of the parameters, which are made at
the beginning of the next step. Each device has one thread. Beside it, torch's own optimizer without
evenstep: in one thread, and in two with half of the parameters each. An update moves 28 bytes for
each parameter and computes little, so two cores are no faster than their common memory allows.

Bytes: a transformer of 12 layers with Adam, in P processes. "held" counts all tensors after a step,
"resident" what the process has more in memory than before the model was made, with a malloc that
returns freed blocks to the system. In theory a process holds 4 + 12 / P bytes for each parameter.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import ALLOCATORS, Benchmark, script
from evenstep.bench import fresh, lineup, paired_ratios
from evenstep.bench.rounds import Run, by_round, select
from evenstep.bench.tables import NOTHING, Table, cells, number, verdict
from evenstep.collectives import deal

UPDATE = {"examples": 16, "warmup_steps": 3, "steps": 15}
BYTES = {"layers": 12, "width": 512, "steps": 3}
SETTINGS = {"update": UPDATE, "bytes": BYTES}
DEVICES = {"own": "cpu:0:own,cpu:1:own", "shared": "cpu:0,cpu:1"}
LABELS = {
    "own": "two devices, each with its own memory",
    "shared": "two devices, one memory",
    "bare": "two threads, without evenstep",
}
PROCESSES = (1, 2, 3)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the figures of one run; None in all processes but the first."""
    return bytes_of(job) if "layers" in job else update_of(job)


def update_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of an update and of its parts, and the fingerprint."""
    if job["memory"] == "bare":
        return bare_update_of(job)
    torch.manual_seed(0)
    model = evenstep.models.resnet18()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(job["examples"], 1, 28, 28), torch.randint(10, (job["examples"],))
    given = {"devices": DEVICES[job["memory"]], "partition": job["partition"]}
    updates: list[float] = []
    copies: list[float] = []
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **given) as trainer:
        with (
            timed(type(trainer._update), "__call__", updates),
            timed(type(trainer._pipeline), "run_in_first_lane", copies),
        ):
            for _ in range(1 + job["warmup_steps"] + job["steps"]):
                trainer.step(*batch)
        fingerprint = trainer.fingerprint()
    behind = [*copies[1:], 0.0] if copies else [0.0] * len(updates)  # of the step before
    whole = [sum(pair) for pair in zip(updates, behind, strict=True)]
    part = slice(job["warmup_steps"], -1)
    return {
        "update_ms": 1e3 * statistics.median(whole[part]),
        "copies_ms": 1e3 * statistics.median(behind[part]),
        "fingerprint": fingerprint,
    }


def bare_update_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of torch's optimizer, in one thread, or in two with half each."""
    parameters = [*evenstep.models.resnet18().parameters()]
    for one in parameters:
        one.grad = torch.randn_like(one)
    owner_of = deal([one.numel() for one in parameters], 2 if job["partition"] else 1)
    parts: list[list[nn.Parameter]] = [[] for _ in {*owner_of}]
    for one, owner in zip(parameters, owner_of, strict=True):
        parts[owner].append(one)
    optimizers = [torch.optim.Adam(part) for part in parts]
    seconds = []
    with ThreadPoolExecutor(len(parts), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(job["warmup_steps"] + job["steps"]):
            began = time.perf_counter()
            for done in [pool.submit(optimizer.step) for optimizer in optimizers]:
                done.result()
            seconds.append(time.perf_counter() - began)
    return {"update_ms": 1e3 * statistics.median(seconds[job["warmup_steps"] :]), "copies_ms": 0.0}


@contextlib.contextmanager
def timed(owner: type, name: str, seconds: list[float]) -> Iterator[None]:
    """Inside `with`, add the seconds of each call of a method to a list."""
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, method)


def bytes_of(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the bytes of this process for each parameter."""
    torch.manual_seed(0)
    width = job["width"]
    batch = torch.randn(6, 8, width), torch.randint(width, (6, 8))
    before, resident = {id(one) for one in _tensors()}, _resident()
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(layer, job["layers"], enable_nested_tensor=False)
    del layer
    optimizer = torch.optim.Adam(model.parameters())
    parameters = sum(map(torch.Tensor.numel, model.parameters()))

    def objective(model: nn.Module, X: torch.Tensor, y: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(model(X).flatten(0, 1), y.flatten(), reduction="sum")
        return loss, y.numel()

    with evenstep.Trainer(
        model, optimizer, objective=objective, devices=1, partition="optimizer", shards=6,
        tune_malloc=False, check="off",
    ) as trainer:  # fmt: skip
        for _ in range(job["steps"]):
            trainer.step(*batch)
        gc.collect()
        new = [one for one in _tensors() if id(one) not in before]
        new += [one.grad for one in new if one.is_leaf and one.grad is not None]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in new}
        held = sum(storage.nbytes() for storage in storages.values())
        found = {
            "parameters": parameters,
            "held": held / parameters,
            "resident": (_resident() - resident) / parameters,
            "fingerprint": trainer.fingerprint(),
        }
    return found if os.environ.get("RANK", "0") == "0" else None


def _tensors() -> list[torch.Tensor]:
    return [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]


def _resident() -> int:
    """Return the bytes of this process that are in memory (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of updates and that of bytes."""
    runs: list[Run] = document["runs"]
    return {
        "update": Table(
            ("update", "devices", "ms", "spread", "of it copies", "times as fast", "≥", "verdict"),
            [row for memory in LABELS for row in _update_rows(runs, memory)],
            2,
        ),
        "bytes": Table(
            ("processes", "held", "resident", "in theory"),
            [_bytes_row(runs, processes) for processes in PROCESSES],
        ),
    }


def _update_rows(runs: list[Run], memory: str) -> list[list[str]]:
    home, owners = (
        by_round(runs, "update_ms", variant=f"update.{memory}.{how}") for how in ("home", "owners")
    )
    ratios, rows = paired_ratios(home, owners), []
    for how, label, found in (("home", "on one", home), ("owners", "on both", owners)):
        if not found:
            continue
        copies = by_round(runs, "copies_ms", variant=f"update.{memory}.{how}").values()
        row = [label, LABELS[memory], *cells(found.values())]
        row.append(number(statistics.median(copies)) if copies else NOTHING)
        if how == "home":
            row += [NOTHING] * 3
        else:
            judged = verdict(ratios, at_least=1.6 if memory == "own" else None)
            row += [cells(ratios)[0], *judged]
        rows.append(row)
    return rows


def _bytes_row(runs: list[Run], processes: int) -> list[str]:
    own = select(runs, variant=f"bytes.{processes}")
    figures = [cells([run[name] for run in own])[0] for name in ("held", "resident")]
    return [str(processes), *figures, number(4 + 12 / processes)]


BENCHMARK = Benchmark(
    name="owners",
    settings=SETTINGS,
    contenders=[
        *(
            script(
                "owners",
                f"update.{memory}.{how}",
                {**UPDATE, "memory": memory, "partition": partition},
            )
            for memory in LABELS
            for how, partition in (("home", None), ("owners", "optimizer"))
        ),
        *(
            script(
                "owners",
                f"bytes.{processes}",
                BYTES,
                launcher=lineup.torchrun(processes),
                threads=1,
                environment=ALLOCATORS["gives_back"],
            )
            for processes in PROCESSES
        ),
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
