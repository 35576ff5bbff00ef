"""The tables of a kit's JSON, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench import summarise
from evenstep.bench.tables import NOT_MEASURED, Table, cells


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return what held, the speeds, and the memory."""
    held, speeds, memory = [], [], []
    for run in document["runs"]:
        name, raced = run["part"], run.get("contenders", {})
        held.append([name, _held(run)])
        plain = summarise(raced["plain"]["ms"]).median if "ms" in raced.get("plain", {}) else None
        for key, one in raced.items():
            if "ms" in one:
                median = summarise(one["ms"]).median
                speed = NOT_MEASURED if plain is None else f"{plain / median:.2f}×"
                speeds.append([name, str(run["examples"]), key, *cells(one["ms"]), speed])
        for key, peak in run.get("peak_bytes", {}).items():
            memory.append([name, key, NOT_MEASURED if peak is None else f"{peak / 2**30:.2f}"])
    head = ("training", "examples", "contender", "ms a step", "spread", "of the plain loop")
    return {
        "holds": Table(("part", "holds"), held, 2),
        "speed": Table(head, speeds),
        "memory": Table(("training", "contender", "peak, GiB"), memory, 2),
    }


def _held(run: Mapping[str, Any]) -> str:
    if "error" in run:
        return f"failed: {run['error'].splitlines()[-1][:80]}"
    return {True: "yes", False: "no", None: NOT_MEASURED}[run.get("holds")]
