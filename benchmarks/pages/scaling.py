"""The section on more devices: the same batch on all of them, and a batch that grows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.bench import Scaled, pictures, scaled
from evenstep.profiling.accounting import PARTS, whole_percents
from pages.common import joined, origin
from text import number, spread, table

_HEAD = ("devices", "batch", "examples/s", "spread", "speed-up", "spread of it", "efficiency")
_PARTS = ("busy", "waiting for data", "waiting for others", "summing", "updating")


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    first = document["contenders"][0]
    name, rounds = first["network"], document["settings"]["rounds"]
    text = (
        f"{rounds} rounds of {first['steps']} steps after {first['warmup_steps']} of warm-up, each "
        f"in a fresh process; batches are put together while it trains, V = {first['shards']}. "
        f"Efficiency is the speed-up over the number of devices. The last columns say where the "
        f"devices' time went."
    )
    parts = []
    for title, same in (("The same batch", True), ("A batch that grows", False)):
        rows = [_row(row) for row in scaled(document, same_batch=same)]
        parts += [f"{title}:", table((*_HEAD, *_PARTS), rows)]
    image = f"![speed-ups and shares of {name}](images/scaling_{name}.png)"
    return joined(f"## More devices: {name}", origin(document), text, parts, image)


def draw(document: dict[str, Any], folder: Path) -> None:
    """Draw the section's picture."""
    name = document["contenders"][0]["network"]
    pictures.draw_scaling(document, folder / f"scaling_{name}.png")


def _row(row: Scaled) -> list[str]:
    percents = whole_percents(row.shares[part] for part in PARTS)
    return [
        str(row.devices),
        str(row.examples),
        number(row.speed.median),
        spread(row.speed),
        f"{row.speed_up.median:.2f}",
        spread(row.speed_up),
        f"{row.efficiency:.0%}",
        *(f"{percent}%" for percent in percents),
    ]
