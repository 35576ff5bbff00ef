"""The section on devices of different speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench.rounds import summarise
from pages.common import joined, note, origin
from targets import UNEVEN_SHARE
from text import NOTHING, number, spread, table, verdict
from uneven_devices import shares_of_sum

SLOWED = {
    "delay": "a delay in its lane after each shard",
    "rivals": "busy processes pinned to its core",
}
ROWS = ("both", "both, without stealing")


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    settings = document["settings"]
    text = (
        f"LeNet, batches of {settings['examples']:,}, V = {settings['shards']}, two CPU devices, "
        f"each pinned to a core; the second one is slowed {settings['factor']} times, in two ways. "
        f"The share is the speed of both together over the sum of the speeds that each has alone "
        f"(beside the same rivals, where there are rivals). "
        f"Without stealing both get the same number of shards. Every run ends with the same "
        f"weights: {_sameness(document)}."
    )
    head = ("slowed by", "devices", "examples/s", "shards of each", "share of the sum", "spread")
    rows = [_row(document["runs"], slowed, part) for slowed in SLOWED for part in ROWS]
    rows.append(_even_row(document["runs"]))
    return joined(
        "## Devices of different speed",
        origin(document),
        text,
        table((*head, "target", "verdict"), rows, text_columns=2),
        note(notes, "uneven_devices"),
    )


def _row(runs: list[dict[str, Any]], slowed: str, part: str) -> list[str]:
    own = [run for run in runs if run["part"] == f"{slowed}.{part}"]
    shares = shares_of_sum(runs, slowed, part)
    if not own or not shares:
        return [SLOWED[slowed], part, *[NOTHING] * 5, "not measured"]
    speed = summarise([run["examples_per_s"] for run in own]).median
    shards = [round(count) for count in _means(_shards(own))]
    share = summarise(shares)
    judged = part == ROWS[0]
    return [
        SLOWED[slowed],
        part,
        number(speed),
        " and ".join(map(str, shards)),
        number(share.median),
        spread(share),
        f"≥ {UNEVEN_SHARE}" if judged else NOTHING,
        verdict(share.median >= UNEVEN_SHARE) if judged else NOTHING,
    ]


def _even_row(runs: list[dict[str, Any]]) -> list[str]:
    """Return the row of two devices that nobody slows: what sharing the machine costs alone."""
    by_part = {
        part: {run["round"]: run for run in runs if run["part"] == part}
        for part in ("even", "fast alone")
    }
    even, alone = by_part["even"], by_part["fast alone"]
    shares = [
        even[turn]["examples_per_s"] / (2 * alone[turn]["examples_per_s"])
        for turn in sorted(even.keys() & alone.keys())
    ]
    if not shares:
        return ["nothing", ROWS[0], *[NOTHING] * 5, "not measured"]
    speed = summarise([run["examples_per_s"] for run in even.values()]).median
    shards = " and ".join(str(round(count)) for count in _means(_shards([*even.values()])))
    share = summarise(shares)
    cells = [number(speed), shards, number(share.median), spread(share)]
    return ["nothing", ROWS[0], *cells, NOTHING, NOTHING]


def _means(rows: list[list[int]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _shards(runs: list[dict[str, Any]]) -> list[list[int]]:
    return [run["shards"] for run in runs]


def _sameness(document: dict[str, Any]) -> str:
    fingerprints = {run["fingerprint"] for run in document["runs"]}
    runs = len(document["runs"])
    return f"{len(fingerprints)} fingerprint{'s' * (len(fingerprints) != 1)} over {runs} runs"
