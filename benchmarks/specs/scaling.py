"""More devices: the tables of what `evenstep bench scaling` measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench import scaled
from evenstep.bench.tables import Table, number, spread
from evenstep.profiling.accounting import PARTS, whole_percents

HEAD = ("devices", "batch", "examples/s", "spread", "speed-up", "spread of it", "efficiency")
PART_NAMES = ("busy", "waiting for data", "waiting for others", "summing", "updating")


def table(document: Mapping[str, Any], *, same_batch: bool) -> Table:
    """Return a row for each number of devices."""
    rows = [
        [
            str(row.devices),
            str(row.examples),
            number(row.speed.median),
            spread(row.speed),
            f"{row.speed_up.median:.2f}",
            spread(row.speed_up),
            f"{row.efficiency:.0%}",
            *(f"{percent}%" for percent in whole_percents(row.shares[part] for part in PARTS)),
        ]
        for row in scaled(document, same_batch=same_batch)
    ]
    return Table((*HEAD, *PART_NAMES), rows)
