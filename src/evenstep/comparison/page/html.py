"""The answer as a page: the verdict, and the two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from evenstep.comparison.aligned import with_common_names
from evenstep.comparison.finding import HARMLESS, Finding
from evenstep.comparison.page.lines import HEIGHT, WIDTH, lines, lines_of_distances
from evenstep.comparison.page.side_by_side import modules_of, updates_of
from evenstep.comparison.reading import Run
from evenstep.pages import template

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def page_of(finding: Finding, ours: Run, theirs: Run) -> str:
    """Return the answer as one HTML file that needs no other."""
    ours, theirs = with_common_names(ours, theirs)
    updates = updates_of(ours, theirs)
    number = min(finding.step or 0, len(updates) - 1)
    losses = [[one.losses[run] for one in updates] for run in (0, 1)]
    known = [one for part in losses for one in part if one is not None and math.isfinite(one)]
    apart = [[one.gradients for one in updates], [one.weights for one in updates]]
    return template(_TEMPLATE, far=_distance, number=_number).render(
        finding=finding,
        is_harmless=finding.cause in HARMLESS,
        runs=(ours, theirs),
        facts=list(_facts(ours, theirs)),
        updates=updates,
        losses=lines(losses),
        least_loss=min(known, default=None),
        most_loss=max(known, default=None),
        apart=lines_of_distances(apart),
        number=number,
        modules=modules_of(ours, theirs, number),
        width=WIDTH,
        height=HEIGHT,
    )


def _facts(ours: Run, theirs: Run) -> Iterator[tuple[str, str, str, bool]]:
    """Yield what is known of both runs: its name, each run's, and whether they differ."""
    first, other = ours.processes[0], theirs.processes[0]
    rows = {
        "command": (" ".join(first.command), " ".join(other.command)),
        "processes": (str(len(ours.processes)), str(len(theirs.processes))),
        "recorded updates": (str(ours.steps), str(theirs.steps)),
    }
    for name in sorted({*first.facts, *other.facts}):
        rows[name] = (first.facts.get(name, "not set"), other.facts.get(name, "not set"))
    for name, (mine, its) in rows.items():
        yield name, mine, its, mine != its


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _distance(value: float | None) -> str:
    if value is None:
        return "not comparable"
    return "equal" if value == 0 else f"{value:.1e}"
