"""Steps of this revision beside those of an earlier one, in turn, in fresh processes.

The environment variable EVENSTEP_BEFORE names a working copy of the earlier revision.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark import FOLDER, ROOT, Benchmark, Contender, script
from evenstep.bench import fresh, paired_ratios
from evenstep.bench.rounds import by_round
from evenstep.bench.tables import Table, cells, median

PLACES = {"before": Path(os.environ.get("EVENSTEP_BEFORE", ROOT)), "now": ROOT}
WORKLOADS = {  # network, examples, steps after as many of warm-up / 5, batch_norm
    "MLP": ("mlp", 256, 500, "shard"),
    "LeNet": ("lenet", 256, 60, "shard"),
    "ResNet-18": ("resnet18", 64, 5, "shard"),
    "ResNet-18, sync": ("resnet18", 64, 5, "sync"),
}


def steps_of(contender: Contender) -> dict[str, Any]:
    """Measure with the sources of one working copy, of which only the public API is used."""
    command = [sys.executable, str(FOLDER / "specs" / "steps_of_revision.py")]
    sources = {"PYTHONPATH": str(PLACES[contender.job["place"]] / "src")}
    return fresh.run_commands([[*command, json.dumps(contender.job)]], variables=sources)


def contender(workload: str, devices: int, place: str) -> Contender:
    """Return steps of a workload on some devices, with the sources of one working copy."""
    network, examples, steps, batch_norm = WORKLOADS[workload]
    names = {"workload": workload, "devices": devices, "place": place}
    sizes = {"network": network, "examples": examples, "steps": steps, "batch_norm": batch_norm}
    job = {**names, **sizes, "warmup_steps": steps // 5 + 1}
    return script("steps_of_revision", ".".join(map(str, names.values())), job, names=names)


def revisions() -> dict[str, str]:
    """Return the commits of both working copies."""
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    return {
        place: subprocess.check_output(git, cwd=folder, text=True).strip()
        for place, folder in PLACES.items()
    }


CASES = [(workload, devices) for workload in WORKLOADS for devices in (1, 2)]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the steps of both revisions, and their ratio within each round."""
    rows, runs = [], document["runs"]
    for workload, devices in CASES:
        before, now = (
            by_round(runs, "median_ms", workload=workload, devices=devices, place=place)
            for place in PLACES
        )
        if ratios := paired_ratios(now, before):
            past = median(before.values(), "{:.1f}".format)
            times = [past, *cells(now.values(), "{:.1f}".format)]
            rows.append([workload, str(devices), *times, *cells(ratios, "{:.2f}".format)])
    head = ("training", "devices", "before, ms", "now, ms", "spread", "ratio", "spread of it")
    return {"steps": Table(head, rows)}


BENCHMARK = Benchmark(
    name="revisions",
    fields=lambda: {"revisions": revisions()},
    contenders=[contender(*case, place) for case in CASES for place in PLACES],
    measure=steps_of,
    tables=tables,
)
