"""Numbers as tables spell them, and tables as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from evenstep.bench.rounds import Summary, summarise

NOTHING = "–"
NOT_MEASURED = "not measured"


def number(value: float) -> str:
    """Return a number with three significant digits, or all digits before the decimal point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def small(value: float) -> str:
    """Return a number as `number` does, with three decimal places if it is below 1."""
    return number(value) if abs(value) >= 1 else f"{value:.3f}"


def with_unit(value: float, unit: str) -> str:
    """Return a number and its unit."""
    return f"{small(value)}{unit}" if unit in ("×", "%") else f"{small(value)} {unit}"


def spread(summary: Summary, spell: Callable[[float], str] = number) -> str:
    """Return the extremes."""
    return f"{spell(summary.least)} to {spell(summary.most)}"


def median(
    values: Collection[float], spell: Callable[[float], str] = number, unit: str = ""
) -> str:
    """Return the median, with its unit; without values, that there is none."""
    return spell(summarise([*values]).median) + unit if values else NOTHING


def cells(
    values: Collection[float], spell: Callable[[float], str] = number, unit: str = ""
) -> list[str]:
    """Return the median, with its unit, and the extremes; without values, that there are none."""
    extremes = spread(summarise([*values]), spell) if values else NOTHING
    return [median(values, spell, unit), extremes]


def verdict(
    values: Collection[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    spell: Callable[[float], str] = str,
) -> list[str]:
    """Return a target and whether the median of the values reaches it.

    Args:
        values: the measured values; none if it was not measured.
        at_least: target from below; None for no such target.
        at_most: target from above; None for no such target.
        spell: returns a target as text.
    """
    bound = at_most if at_least is None else at_least
    shown = NOTHING if bound is None else f"{'≤' if at_least is None else '≥'} {spell(bound)}"
    if not values:
        return [shown, NOT_MEASURED]
    if bound is None:
        return [shown, NOTHING]
    found = summarise([*values]).median
    reached = found <= bound if at_least is None else found >= bound
    return [shown, "reached" if reached else "**not reached**"]


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """A table of text. It prints as Markdown, and a notebook shows it as a table."""

    head: Sequence[str]  # titles of the columns
    rows: Sequence[Sequence[str]]  # cells of each row
    text_columns: int = 1  # number of left-aligned columns; the others are right-aligned

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["---" if column < self.text_columns else "---:" for column in range(len(self.head))]
        lines = (self.head, rule, *self.rows)
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    __repr__ = _repr_markdown_ = markdown
