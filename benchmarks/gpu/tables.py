"""The tables of a kit's JSON, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench import summarise
from evenstep.bench.tables import NOT_MEASURED, Table, number, spread

_GIB = 2**30


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return what held, the speeds, and the memory."""
    runs = {run["part"]: run for run in document["runs"]}
    return {
        "holds": Table(("part", "holds"), [[name, _held(run)] for name, run in runs.items()], 2),
        "speed": Table(
            ("training", "examples", "contender", "ms a step", "spread", "of the plain loop"),
            [row for name, run in runs.items() if "contenders" in run for row in _rows(name, run)],
        ),
        "memory": Table(
            ("training", "contender", "peak, GiB"),
            [
                [name, contender, NOT_MEASURED if peak is None else f"{peak / _GIB:.2f}"]
                for name, run in runs.items()
                for contender, peak in run.get("peak_bytes", {}).items()
            ],
            2,
        ),
    }


def _held(run: Mapping[str, Any]) -> str:
    if "error" in run:
        return f"failed: {run['error'].splitlines()[-1][:80]}"
    return {True: "yes", False: "no", None: NOT_MEASURED}[run.get("holds")]


def _rows(name: str, run: Mapping[str, Any]) -> list[list[str]]:
    measured = {key: one["ms"] for key, one in run["contenders"].items() if "ms" in one}
    plain = summarise(measured["plain"]).median if "plain" in measured else None
    rows = []
    for key, times in measured.items():
        found = summarise(times)
        speed = NOT_MEASURED if plain is None else f"{plain / found.median:.2f}×"
        rows.append([name, str(run["examples"]), key, number(found.median), spread(found), speed])
    return rows
