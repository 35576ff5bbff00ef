"""Steps of this revision beside those of an earlier one, in turn, in fresh processes.

The environment variable EVENSTEP_BEFORE names a working copy of the earlier revision.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark import ROOT, Benchmark, script
from evenstep.bench import Contender, paired_ratios
from evenstep.bench.rounds import by_round
from evenstep.bench.tables import Table, cells

BEFORE = Path(os.environ.get("EVENSTEP_BEFORE", ROOT))
PLACES = {"before": BEFORE, "now": ROOT}
WORKLOADS = {  # network, examples, steps after as many of warm-up / 5, batch_norm
    "MLP": ("mlp", 256, 500, "shard"),
    "LeNet": ("lenet", 256, 60, "shard"),
    "ResNet-18": ("resnet18", 64, 5, "shard"),
    "ResNet-18, sync": ("resnet18", 64, 5, "sync"),
}


def contender(workload: str, devices: int, place: str) -> Contender:
    """Return steps of a workload on some devices, with the sources of one working copy."""
    network, examples, steps, batch_norm = WORKLOADS[workload]
    names = {"workload": workload, "devices": devices, "place": place}
    sizes = {"network": network, "examples": examples, "steps": steps, "batch_norm": batch_norm}
    return script(
        "steps_of_revision",
        f"{workload}.{devices}.{place}",
        {**names, **sizes, "warmup_steps": steps // 5 + 1},
        names=names,
    )


def revisions() -> dict[str, str]:
    """Return the commits of both working copies."""
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    return {
        place: subprocess.check_output(git, cwd=folder, text=True).strip()
        for place, folder in PLACES.items()
    }


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the steps of both revisions, and their ratio within each round."""
    rows = []
    for workload in WORKLOADS:
        for devices in (1, 2):
            before, now = (
                by_round(
                    document["runs"], "median_ms", workload=workload, devices=devices, place=place
                )
                for place in PLACES
            )
            if ratios := paired_ratios(now, before):
                times = [cells([*one.values()], "{:.1f}".format) for one in (before, now)]
                row = [workload, str(devices), times[0][0], *times[1]]
                rows.append([*row, *cells(ratios, "{:.2f}".format)])
    head = ("training", "devices", "before, ms", "now, ms", "spread", "ratio", "spread of it")
    return {"steps": Table(head, rows)}


BENCHMARK = Benchmark(
    name="revisions",
    fields=lambda: {"revisions": revisions()},
    contenders=[
        contender(workload, devices, place)
        for workload in WORKLOADS
        for devices in (1, 2)
        for place in PLACES
    ],
    tables=tables,
)
