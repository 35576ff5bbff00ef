"""A small network called again and again: as it is, and as `evenstep.hybridize` returns it.

Network and calls are those of Dive into Deep Learning, "Compilers and Interpreters". Every round is
a fresh process that times both in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark import Benchmark, Contender, column
from evenstep.bench.tables import NOTHING, Table, cells, verdict

TARGET_GAIN = 1.6
SETTINGS = {"calls": 1000, "rounds": 15}  # rounds: turns within a process


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of calls."""
    eager, fast = (column(document["runs"], f"{name}_us") for name in ("eager", "hybrid"))
    gains = [one / other for one, other in zip(eager, fast, strict=True)]
    judged = verdict(gains, at_least=TARGET_GAIN, spell="{}×".format)
    rows = [
        ["`net(x)`", *cells(eager), *[NOTHING] * 4],
        ["`evenstep.hybridize(net, x)(x)`", *cells(fast), *cells(gains, unit="×"), *judged],
    ]
    head = ("called", "µs a call", "spread", "gain", "spread of it", "target", "verdict")
    return {"calls": Table(head, rows)}


MODULE, JOB = "evenstep.reproduce.measures", {"measure": "hybrid_calls", **SETTINGS}
BENCHMARK = Benchmark(
    name="hybridize",
    settings=SETTINGS,
    contenders=[Contender(key="both", module=MODULE, job=JOB, names={})],
    tables=tables,
)
