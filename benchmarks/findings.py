"""From the runs of the book's experiments to rows of text. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from book import Finding
from evenstep.bench.rounds import Summary, paired_ratios, summarise
from text import NOTHING, number, verdict

HEAD = ("", "the book", "here", "spread", "here / book", "target", "verdict")

Runs = Sequence[Mapping[str, Any]]


def row(finding: Finding, runs: Runs) -> list[str]:
    """Return a finding's row: HEAD says what is in it."""
    book = NOTHING if finding.book is None else _with_unit(finding.book, finding.unit)
    summary = measured(finding, runs)
    if summary is None:
        return [finding.text, book, NOTHING, NOTHING, NOTHING, target(finding), "not measured"]
    return [
        finding.text,
        book,
        _with_unit(summary.median, finding.unit),
        f"{small(summary.least)} to {small(summary.most)}",
        NOTHING if finding.book is None else small(summary.median / finding.book),
        target(finding),
        _verdict(finding, summary.median),
    ]


def measured(finding: Finding, runs: Runs) -> Summary | None:
    """Return the median and the extremes over the rounds; None if nothing was measured.

    A ratio is taken within each round.
    """
    figures = _figures(finding.figure, runs)
    values = list(figures.values())
    if finding.over is not None:
        values = paired_ratios(figures, _figures(finding.over, runs))
    return summarise([finding.scale * value for value in values]) if values else None


def target(finding: Finding) -> str:
    """Return the target as text."""
    if finding.at_least is not None:
        return f"≥ {_with_unit(finding.at_least, finding.unit)}"
    if finding.at_most is not None:
        return f"≤ {_with_unit(finding.at_most, finding.unit)}"
    return NOTHING


def small(value: float) -> str:
    """Return a number as `text.number` does, with three places behind the point if below 1."""
    return number(value) if abs(value) >= 1 else f"{value:.3f}"


def _verdict(finding: Finding, value: float) -> str:
    if finding.at_least is not None:
        return verdict(value >= finding.at_least)
    if finding.at_most is not None:
        return verdict(value <= finding.at_most)
    return NOTHING


def _figures(name: str, runs: Runs) -> dict[int, float]:
    key, field = name.split(":")
    return {run["round"]: run[field] for run in runs if run["key"] == key}


def _with_unit(value: float, unit: str) -> str:
    return f"{small(value)}{unit}" if unit in ("×", "%") else f"{small(value)} {unit}"
