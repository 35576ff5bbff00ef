"""The section on a step's own overhead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench.rounds import summarise
from pages.common import joined, note, origin
from targets import STEP_OVERHEAD_MS
from text import NOTHING, table, verdict

JUDGED = "2"  # devices, each with a thread of its own


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    settings = document["settings"]
    text = (
        f"A model of one scalar parameter, V = {settings['shards']}: what is left of a step is its "
        f"overhead. The plain loop runs forward, backward, sum and update of the same shards in "
        f"one thread, without evenstep. Each run's figure is the median of {settings['steps']:,} "
        f"steps; the table has the median over the runs, and likewise the tenth and the ninetieth "
        f"percentile of the steps. The target is for the whole step, not for its difference to the "
        f"plain loop."
    )
    head = ("step", "ms", "least to most run", "10% to 90% of the steps", "target", "verdict")
    rows = [_row(document, variant, label) for variant, label in document["variants"].items()]
    return joined(
        "## Overhead of a step",
        origin(document),
        text,
        table(head, rows),
        note(notes, "step_overhead"),
    )


def _row(document: dict[str, Any], variant: str, label: str) -> list[str]:
    runs = [run for run in document["runs"] if run["variant"] == variant]
    if not runs:
        return [label, *[NOTHING] * 4, "not measured"]
    median = summarise([run["median_ms"] for run in runs])
    low = summarise([run["tenth_ms"] for run in runs]).median
    high = summarise([run["ninetieth_ms"] for run in runs]).median
    judged = variant == JUDGED
    return [
        label,
        f"{median.median:.3f}",
        f"{median.least:.3f} to {median.most:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"≤ {STEP_OVERHEAD_MS}" if judged else NOTHING,
        verdict(median.median <= STEP_OVERHEAD_MS) if judged else NOTHING,
    ]
