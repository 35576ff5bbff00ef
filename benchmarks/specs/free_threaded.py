"""LeNet and nanoGPT by a free-threaded Python beside an ordinary one: an experiment.

Both are environments of `make versions`. Torch has an open crash in concurrent allocation
(https://github.com/pytorch/pytorch/issues/171992); evenstep claims nothing for such a Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark import ROOT, Benchmark, Contender
from evenstep.bench import fresh
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import Table, cells

sys.path.append(str(ROOT / "tests" / "versions"))
from environments import ENVIRONMENTS

PYTHONS = {"ordinary": "3.14", "free-threaded": "3.14t"}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "LeNet, 256": {"network": "lenet", "examples": 256, "warmup_steps": 10, "steps": 60},
    "GPT of text, 64": {"network": "chargpt-small", "examples": 64, "warmup_steps": 1, "steps": 6},
}
DEVICES = (1, 2)
FACTS = """
import sys, json, torch, evenstep
evenstep.Trainer
has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
print(json.dumps({"python": sys.version, "torch": torch.__version__, "has_lock": has_lock}))
"""


def measure(contender: Contender) -> dict[str, Any]:
    """Return the speed of a training by the contender's interpreter."""
    kind, job = contender.marks["python"], json.dumps(contender.job)
    return _run(kind, "-m", "evenstep.bench", contender.module, job)


def _run(kind: str, *arguments: str) -> dict[str, Any]:
    (one,) = (one for one in ENVIRONMENTS if one.python == PYTHONS[kind])
    return fresh.run_commands([[str(one.interpreter), *arguments]], variables=one.variables)


def fields() -> dict[str, Any]:
    """Return the facts of both interpreters."""
    return {"pythons": {kind: _run(kind, "-c", FACTS) for kind in PYTHONS}}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of speeds."""
    rows = []
    for name in JOBS:
        for devices in DEVICES:
            runs = select(document["runs"], job=name, devices=devices)
            old, new = (_speeds(runs, kind) for kind in PYTHONS)
            ratios = [new[number] / old[number] for number in old if number in new]
            speeds = *cells(old.values()), *cells(new.values())
            rows.append([f"{name}; {devices}", *speeds, *cells(ratios, unit="×")])
    head = ("work; devices", "ordinary", "spread", "free-threaded", "spread", "ratio", "spread")
    return {"speeds": Table(head, rows)}


def _speeds(runs: Sequence[Run], kind: str) -> dict[int, float]:
    """Return the speeds by round; a round that was cut off lacks some."""
    return {run["round"]: run["examples_per_s"] for run in select(runs, python=kind)}


BENCHMARK = Benchmark(
    name="free_threaded",
    measure=measure,
    fields=fields,
    tables=tables,
    contenders=[
        Contender(
            key=f"{job['network']}.{devices}.{kind}",
            module="evenstep.bench.contenders",
            job={**job, "workers": devices},
            names={"job": name, "devices": devices, "python": kind},
        )
        for name, job in JOBS.items()
        for devices in DEVICES
        for kind in PYTHONS
    ],
)
