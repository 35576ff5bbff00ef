"""The timeline of a trace's last steps as a page: a row for each device, a bar for each shard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from evenstep.pages import template
from evenstep.profiling.accounting import PARTS, whole_percents
from evenstep.profiling.reader import Event, TraceAccount

STEPS = 6
"""The largest number of steps that are drawn: the last ones."""

WIDTH, HEIGHT, LEFT = 1100, 30, 110  # of the drawing, of a row, and of the rows' names
_TICKS = 8
_TEMPLATE = Path(__file__).with_name("timeline.html.jinja")
_KINDS = {
    "compute": "a shard",
    "stolen": "a shard of a different device's run",
    "sum": "summing",
    "update": "updating",
    "copy": "copying",
    "load": "loading",
}
"""The kinds of bars that are drawn, in words."""


class Bar(NamedTuple):
    """A bar in a row: where it is drawn, and what is said of it.

    Attributes:
        kind: one of `_KINDS`.
        x, width: its place, in pixels.
        text: what it is, for who points at it.
        label: what stands in it; empty where there is no room.
    """

    kind: str
    x: float
    width: float
    text: str
    label: str


def timeline_page(account: TraceAccount, events: Sequence[Event], findings: Sequence[str]) -> str:
    """Return one HTML file, which needs no other, with the last steps of a trace.

    Args:
        account: the sums over all its steps.
        events: its bars.
        findings: what would help, a paragraph each.
    """
    steps = sorted((one for one in events if one.row == "steps" and one.category == "step"),
                   key=lambda one: one.began_s)[-STEPS:]  # fmt: skip
    began_s, ended_s = steps[0].began_s, steps[-1].ended_s
    scale = (WIDTH - LEFT) / (ended_s - began_s or 1.0)
    inside = [
        one
        for one in events
        if one.category in _KINDS and one.began_s < ended_s and one.ended_s > began_s
    ]
    rows = {
        row: [*_bars([one for one in inside if one.row == row], began_s, ended_s, scale)]
        for row in _rows(account, inside)
    }
    return template(_TEMPLATE).render(
        account=account,
        findings=findings,
        rows=rows,
        kinds=_KINDS,
        used={bar.kind for bars in rows.values() for bar in bars},
        steps=[(one.step, LEFT + (one.began_s - began_s) * scale) for one in steps],
        ticks=[*_ticks(ended_s - began_s, scale)],
        parts=[part.replace("_", " ") for part in PARTS],
        shares=[
            (one, whole_percents(one.shares[part] for part in PARTS)) for one in account.devices
        ],
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
    )


def _rows(account: TraceAccount, events: Sequence[Event]) -> list[str]:
    """Return the rows that have bars: what loads, then each device with its copies."""
    devices = [one.device for one in account.devices]
    order = ["front end", *(name for one in devices for name in (one, f"copy {one}"))]
    used = {one.row for one in events}
    return [row for row in order if row in used or row in devices]


def _bars(events: Sequence[Event], began_s: float, ended_s: float, scale: float) -> Iterator[Bar]:
    for one in events:
        first, last = max(one.began_s, began_s), min(one.ended_s, ended_s)
        width = (last - first) * scale
        of = f" of step {one.step}" if one.step is not None else ""
        what = _KINDS[one.category]
        if one.is_shard:
            what = f"shard {one.shard}" + (", backward" if one.backward else "")
        text = f"{what}{of}: {one.seconds * 1e3:.2f} ms"
        kind = "stolen" if one.is_shard and one.stolen else one.category
        label = str(one.shard) if one.is_shard and width > 14 else ""
        yield Bar(kind, LEFT + (first - began_s) * scale, max(width, 0.5), text, label)


def _ticks(seconds: float, scale: float) -> Iterator[tuple[str, float]]:
    """Yield the labels and places of round times, in milliseconds."""
    least = seconds * 1e3 / _TICKS or 1.0
    power = 10 ** math.floor(math.log10(least))
    every = next((one * power for one in (1, 2, 5) if one * power >= least), 10 * power)
    for n in range(int(seconds * 1e3 / every) + 1):
        yield f"{n * every:g} ms", LEFT + n * every * 1e-3 * scale
