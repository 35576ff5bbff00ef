"""From the runs of the book's experiments to figures, as tables spell them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.bench import Summary, paired_ratios, summarise
from evenstep.book.reproduce.book import Finding

Runs = Sequence[Mapping[str, Any]]


def measured(finding: Finding, runs: Runs) -> Summary | None:
    """Return the median and the extremes over the rounds; None if nothing was measured.

    A ratio is taken within each round.
    """
    figures = _figures(finding.figure, runs)
    values = list(figures.values())
    if finding.over is not None:
        values = paired_ratios(figures, _figures(finding.over, runs))
    return summarise([finding.scale * value for value in values]) if values else None


def number(value: float) -> str:
    """Return a number with three significant digits or all that stand before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def small(value: float) -> str:
    """Return a number as `number` does, with three places behind the point if below 1."""
    return number(value) if abs(value) >= 1 else f"{value:.3f}"


def with_unit(value: float, unit: str) -> str:
    """Return a number and its unit."""
    return f"{small(value)}{unit}" if unit in ("×", "%") else f"{small(value)} {unit}"


def _figures(name: str, runs: Runs) -> dict[int, float]:
    key, field = name.split(":")
    return {run["round"]: run[field] for run in runs if run["key"] == key}
