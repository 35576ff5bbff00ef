"""`Owners`: the bytes of a process.

A transformer of 12 layers with Adam, in P processes. "held" counts all tensors after a step,
"resident" what the process has more in memory than before the model was made, with a malloc that
returns freed blocks to the system. In theory a process holds 4 + 12 / P bytes for each parameter.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import ALLOCATORS, Benchmark, column, script
from evenstep.bench import lineup, machine
from evenstep.bench.tables import Table, median, number

BYTES = {"layers": 12, "width": 512, "steps": 3}
PROCESSES = (1, 2, 3)


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the bytes of this process for each parameter; None in all processes but the first."""
    torch.manual_seed(0)
    width = job["width"]
    batch = torch.randn(6, 8, width), torch.randint(width, (6, 8))
    before, resident = {id(one) for one in _tensors()}, machine.resident_bytes()
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(layer, job["layers"], enable_nested_tensor=False)
    del layer
    optimizer = torch.optim.Adam(model.parameters())
    parameters = sum(map(torch.Tensor.numel, model.parameters()))
    options = {
        "layout": evenstep.Layout(divide=evenstep.Owners(), tune_malloc=False),
        "faults": evenstep.Faults(check="off"),
        "shards": 6,
    }
    with evenstep.Trainer(model, optimizer, objective=_of_words, devices=1, **options) as trainer:
        for _ in range(job["steps"]):
            trainer.step(*batch)
        gc.collect()
        new = [one for one in _tensors() if id(one) not in before]
        new += [one.grad for one in new if one.is_leaf and one.grad is not None]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in new}
        found = {
            "parameters": parameters,
            "held": sum(storage.nbytes() for storage in storages.values()) / parameters,
            "resident": (machine.resident_bytes() - resident) / parameters,
            "fingerprint": trainer.fingerprint(),
        }
    return found if os.environ.get("RANK", "0") == "0" else None


def _of_words(model: nn.Module, X: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    scores = model(X).flatten(0, 1)
    return nn.functional.cross_entropy(scores, y.flatten(), reduction="sum"), y.numel()


def _tensors() -> list[torch.Tensor]:
    return [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of bytes."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        processes = one.key.removeprefix("bytes.")
        found = [median(column(runs, name)) for name in ("held", "resident")]
        rows.append([processes, *found, number(4 + 12 / int(processes))])
    return {"bytes": Table(("processes", "held", "resident", "in theory"), rows)}


BENCHMARK = Benchmark(
    name="owners",
    settings={"bytes": BYTES},
    contenders=[
        script(
            "owners",
            f"bytes.{processes}",
            BYTES,
            launcher=lineup.torchrun(processes),
            threads=1,
            environment=ALLOCATORS["gives_back"],
        )
        for processes in PROCESSES
    ],
    tables=tables,
)
