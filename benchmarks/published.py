"""Published tables beside what `evenstep.planning` predicts from their first row.

The model is told what the tables' hardware is in `published.json`: the rates of its links, the
bytes that a step exchanges, and the examples of a device, each number with where it was found, or
"assumed". The first row gives the time of a step on one device (or, where no row is of one, on the
fewest). Nothing is fitted.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmark import FOLDER
from evenstep.bench.tables import Table, number
from evenstep.planning import Arrangement, Link, Machine, Work
from evenstep.planning.prediction import usual_s

_USABLE = 0.94  # of a network's rate: as `evenstep.planning.parse_network`
_PER_DEVICE = "tokens/s/GPU"
_WHAT = {
    "each": "examples of a device",
    "exchanged_mb": "MB exchanged",
    "local_gbyte_s": "GB/s in a machine, one way",
    "network_gbit_s": "Gbit/s of a machine",
    "latency_us": "us of latency",
    "exchange": "how gradients are added",
}


def tables_published() -> list[dict[str, Any]]:
    """Return the published tables."""
    found: list[dict[str, Any]] = json.loads((FOLDER / "published.json").read_text("utf-8"))
    return found


def rows(one: Mapping[str, Any]) -> Iterator[tuple[int, float, float]]:
    """Yield devices, the predicted and the published figure, without the first row."""
    published = {int(devices): float(speed) for devices, speed in one["published"].items()}
    first, *others = published
    is_each = one["unit"] == _PER_DEVICE
    speed_of_one = published[first] / (1 if is_each else first)
    alone_s = told(one)["each"] / speed_of_one
    base_s = step_s(one, first, alone_s)
    for devices in others:
        efficiency = base_s / step_s(one, devices, alone_s)
        whole = published[first] * efficiency
        yield devices, whole if is_each else whole * devices / first, published[devices]


def told(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model is told of a table, without where it was found."""
    return {name: value for name, (value, _) in one["told"].items()}


def step_s(one: Mapping[str, Any], devices: int, alone_s: float) -> float:
    """Return the seconds of a step on some devices, each of which has a batch of its own."""
    given = told(one)
    latency_s = given["latency_us"] * 1e-6
    gbit = given["network_gbit_s"]
    network = Link(
        bytes_per_s=math.inf if gbit is None else gbit * 1e9 / 8 * _USABLE, latency_s=latency_s
    )
    machine = Machine(
        devices=one["per_machine"],
        has_own_memory=True,
        local=Link(bytes_per_s=given["local_gbyte_s"] * 1e9, latency_s=latency_s),
        network=network,
    )
    work = Work(
        name=one["trained"],
        examples=given["each"] * devices,
        shards=devices,
        shard_s=(alone_s,),
        gradient_nbytes=int(given["exchanged_mb"] * 1e6),
        device="gpu",
    )
    layout = Arrangement(
        devices=devices, per_machine=one["per_machine"], exchange=given["exchange"]
    )
    return usual_s(work, machine, layout)


@functools.cache
def all_rows() -> tuple[tuple[dict[str, Any], int, float, float], ...]:
    """Return each table with each of its rows, which take seconds to simulate."""
    return tuple((one, *row) for one in tables_published() for row in rows(one))


def errors() -> list[float]:
    """Return the error of each predicted row."""
    return [predicted / measured - 1 for _, _, predicted, measured in all_rows()]


def table() -> Table:
    """Return all rows: predicted, published, and the error."""
    found = []
    for one, devices, predicted, measured in all_rows():
        what = f"[{one['source']}]({one['url']}): {one['trained']}"
        figures = [number(predicted), number(measured), f"{predicted / measured - 1:+.1%}"]
        found.append([what, one["hardware"], str(devices), *figures, one["unit"]])
    heads = ("table", "hardware", "devices", "predicted", "published", "error", "unit")
    return Table(heads, found, 2)


def sources() -> Table:
    """Return each number that the model is told, the tables that it is for, and its source."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in tables_published():
        for name, (value, source) in one["told"].items():
            if value is not None:
                row = (_WHAT[name], value if isinstance(value, str) else f"{value:,}", source)
                found.setdefault(row, []).append(one["short"])
    rows = [
        [what, ", ".join(names), value, source]
        for what in _WHAT.values()
        for (about, value, source), names in found.items()
        if about == what
    ]
    return Table(("number", "table", "value", "source"), rows, 2)
