"""The figures that are measured in fresh processes: their source, and what the book printed.

`findings.csv` lists them. The book is Dive into Deep Learning with MXNet, sections 8.1.2
("Hybridizing the Sequential Class"), 8.2 ("Asynchronous Computation") and 8.3 ("Automatic
Parallelism"). The calls of 8.1.2 are a thousand. Section 8.3 prints no figures. The
time until a product was computed is the book's "queued" and, from then on, "finished" (1.4 ms +
351.7 ms). The target 1.09 is the gain of MXNet 1.9.1 on the machine of the first measurements.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenstep.bench import paired_ratios
from evenstep.bench.rounds import Run, by_round
from evenstep.bench.tables import NOTHING, with_unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A row of a table: one figure, or the ratio of two figures of the same round."""

    text: str  # what the figure is
    figure: str  # "key:field" of a measurement
    over: str | None = None  # "key:field" of the divisor; None to show the figure itself
    scale: float = 1.0  # factor that converts the figure to `unit`
    unit: str  # unit in which the figure is shown
    book: float | None = None  # the book's figure in `unit`; None if the book prints none
    at_least: float | None = None  # target from below; None for no target
    at_most: float | None = None  # target from above; None for no target
    in_report: bool = False  # whether the report of `evenstep reproduce` has the row
    why: str = ""  # what differs from the book, and why
    below: float | None = None  # figures below this have `why_below`; None: none have
    why_below: str = ""  # what stands in place of `why`

    @property
    def book_text(self) -> str:
        """The book's figure as text."""
        return NOTHING if self.book is None else with_unit(self.book, self.unit)

    def reason(self, value: float) -> str:
        """Return what explains a figure of this value."""
        return self.why if self.below is None or value >= self.below else self.why_below

    def values(self, runs: Sequence[Run]) -> list[float]:
        """Return the figure of each round in which it was measured."""
        figures = _figures(self.figure, runs)
        values = [*figures.values()]
        if self.over is not None:
            values = paired_ratios(figures, _figures(self.over, runs))
        return [self.scale * value for value in values]


def _figures(name: str, runs: Sequence[Run]) -> dict[int, float]:
    key, field = name.split(":")
    return by_round(runs, field, key=key)


@functools.cache
def read_findings() -> Mapping[str, Sequence[Finding]]:
    """Return the rows of each experiment's table."""
    found: dict[str, list[Finding]] = {}
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            book, at_least, at_most, below = (
                float(row[name]) if row[name] else None
                for name in ("book", "at_least", "at_most", "below")
            )
            finding = Finding(
                text=row["text"],
                figure=row["figure"],
                over=row["over"] or None,
                scale=float(row["scale"]),
                unit=row["unit"],
                book=book,
                at_least=at_least,
                at_most=at_most,
                in_report=row["in_report"] == "yes",
                why=row["why"],
                below=below,
                why_below=row["why_below"],
            )
            found.setdefault(row["experiment"], []).append(finding)
    return found
