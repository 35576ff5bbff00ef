"""Markdown from rows of text, and numbers as the tables spell them."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.bench.rounds import Summary
from evenstep.book.reproduce.findings import number as number

NOTHING = "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Return a table; all columns but the first `text_columns` are aligned right."""
    rule = ["---" if column < text_columns else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def spread(summary: Summary) -> str:
    """Return the extremes: least to most."""
    return f"{number(summary.least)} to {number(summary.most)}"


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.0f}%"


def mebibytes(nbytes: float) -> str:
    """Return bytes in MiB."""
    return f"{nbytes / 2**20:,.0f}"


def verdict(reached: bool) -> str:
    """Return what a target's last column says."""
    return "reached" if reached else "**not reached**"
