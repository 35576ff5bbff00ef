"""From the runs of the book's experiments to rows of text. Pure functions."""

from __future__ import annotations

from evenstep.book.reproduce.book import Finding
from evenstep.book.reproduce.findings import Runs, measured, small, with_unit
from text import NOTHING, verdict

HEAD = ("", "the book", "here", "spread", "here / book", "target", "verdict")


def row(finding: Finding, runs: Runs) -> list[str]:
    """Return a finding's row: HEAD says what is in it."""
    book = NOTHING if finding.book is None else with_unit(finding.book, finding.unit)
    summary = measured(finding, runs)
    if summary is None:
        return [finding.text, book, NOTHING, NOTHING, NOTHING, target(finding), "not measured"]
    return [
        finding.text,
        book,
        with_unit(summary.median, finding.unit),
        f"{small(summary.least)} to {small(summary.most)}",
        NOTHING if finding.book is None else small(summary.median / finding.book),
        target(finding),
        _verdict(finding, summary.median),
    ]


def target(finding: Finding) -> str:
    """Return the target as text."""
    if finding.at_least is not None:
        return f"≥ {with_unit(finding.at_least, finding.unit)}"
    if finding.at_most is not None:
        return f"≤ {with_unit(finding.at_most, finding.unit)}"
    return NOTHING


def _verdict(finding: Finding, value: float) -> str:
    if finding.at_least is not None:
        return verdict(value >= finding.at_least)
    if finding.at_most is not None:
        return verdict(value <= finding.at_most)
    return NOTHING
