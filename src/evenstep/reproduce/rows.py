"""Makes the rows of the report from measured figures.

`findings.csv` lists the figures of fresh processes: their source, and what the book printed. The
book is Dive into Deep Learning with MXNet, sections 8.1.2 ("Hybridizing the Sequential Class"), 8.2
("Asynchronous Computation") and 8.3 ("Automatic Parallelism"). The calls of 8.1.2 are a thousand.
Section 8.3 prints no figures. The time until a product was computed is the book's "queued" and,
from then on, "finished" (1.4 ms + 351.7 ms). The target 1.09 is the gain of MXNet 1.9.1 on the
machine of the first measurements.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench import paired_ratios, summarise
from evenstep.bench.rounds import Run, by_round
from evenstep.bench.tables import NOTHING, Table, with_unit
from evenstep.errors import counted
from evenstep.reproduce.plan import Figures, Row, Size

CAVEATS: Mapping[Size, str] = {
    "full": "The initial weights and the order of the examples differ from the book's.",
    "quick": "Quick run: few examples and epochs; accuracies are no result.",
}
_BOOK_EPOCHS = 4
_EPOCH = 60_000  # examples of Fashion-MNIST


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
    with Path(__file__).with_name("findings.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = {**row, "over": row["over"] or None}
            for name in ("scale", "book", "at_least", "at_most", "below"):
                values[name] = float(row[name]) if row[name] else None
            values["in_report"] = row["in_report"] == "yes"
            found.setdefault(values.pop("experiment"), []).append(Finding(**values))
    return found


def table(rows: Sequence[Row]) -> Table:
    """Return the table of rows."""
    cells = [[row.text, row.book, row.here, row.why] for row in rows]
    return Table(("", "the book", "here", "what differs, and why"), cells, 4)


def measured(prefixes: Mapping[str, str], figures: Figures) -> list[Row]:
    """Return the rows of findings that were measured; `prefixes` are theirs by experiment."""
    runs = [{"round": 0, "key": key, **found} for key, found in figures.items()]
    rows = []
    for name, prefix in prefixes.items():
        for finding in read_findings()[name]:
            if finding.in_report and (values := finding.values(runs)):
                value = summarise(values).median
                here = with_unit(value, finding.unit)
                why = finding.reason(value).format(**figures.get(name, {}))
                text = prefix + finding.text
                rows.append(Row(text=text, book=finding.book_text, here=here, why=why))
    return rows


def compared(text: str, fingerprints: Sequence[str], why: str) -> Row:
    """Return the row that compares fingerprints; different ones have no other explanation."""
    prints = [f"`{one[:12]}…`" for one in fingerprints]
    if len(set(fingerprints)) == 1:
        return Row(text=text, here="equal", why=f"{prints[0]} {why}")
    broken = f"{', '.join(prints)}: the promise is broken; please report it, with figures.json."
    return Row(text=text, here="DIFFERENT", why=broken)


def trained(
    rows: Sequence[Mapping[str, Any]], size: Size, words: Mapping[str, str], figures: Figures
) -> list[Row]:
    """Return the rows on trainings that were measured.

    Args:
        rows: their descriptions.
        size: "quick" marks the accuracies as such, and explains none of them.
        words: fill in the texts.
        figures: what was measured.
    """
    found = []
    for row in rows:
        kind = next(name for name in ("same", *_KINDS) if name in row)
        keys = [row[kind]] if isinstance(row[kind], str) else row[kind]
        if not all(key in figures for key in keys):
            continue
        parts = [figures[key] for key in keys]
        if kind == "same":
            prints = [one["fingerprint"] for one in parts]
            made = compared(row["text"], prints, row["why"])
        else:
            text, value = _KINDS[kind][0](row, *parts)
            _, spell, spell_book = _KINDS[kind]
            book = spell_book(row["book"]) if "book" in row else NOTHING
            why = _reason(row, value, figures)
            made = Row(text=text, book=book, here=spell(value), why=why)
            if kind == "accuracy" and size == "quick":
                here, why = f"{made.here} (quick)", CAVEATS["quick"]
                made = dataclasses.replace(made, here=here, why=why)
        devices = " and ".join(parts[0].get("shares", ())) or "CPU devices"
        more = {**words, "devices": devices}
        filled = {"text": made.text.format(**more), "why": made.why.format(**more)}
        found.append(dataclasses.replace(made, **filled))
    return found


def _reason(row: Mapping[str, Any], value: float, figures: Figures) -> str:
    """Return what explains a figure of this value: `below` is a number or a different training."""
    below = row.get("below")
    if isinstance(below, str):
        below = figures[below]["accuracies"][-1] if below in figures else None
    return str(row.get("why", "") if below is None or value >= below else row.get("why_below", ""))


def _accuracy(row: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[str, float]:
    """Return the last epoch's or, beside a figure of the book, that of the book's last epoch."""
    accuracies = training["accuracies"][: _BOOK_EPOCHS if "book" in row else None]
    return f"{row['text']}: accuracy after {counted(len(accuracies), 'epoch')}", accuracies[-1]


def _epoch(row: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[str, float]:
    return f"{row['text']}: seconds for {_EPOCH:,} examples", _epoch_s(training)


def _speed_up(row: Mapping[str, Any], one: Any, two: Any) -> tuple[str, float]:
    return row["text"], _epoch_s(one) / _epoch_s(two)


def _epoch_s(training: Mapping[str, Any]) -> float:
    """Return the seconds of an epoch with as many examples as the book's."""
    examples = training["training"]["examples"] or _EPOCH
    seconds: list[float] = training["seconds"]
    return sum(seconds) / len(seconds) * _EPOCH / examples


_in_s, _times = (functools.partial(with_unit, unit=unit) for unit in ("s", "×"))
_Spell = Callable[[float], str]
_KINDS: Mapping[str, tuple[Callable[..., tuple[str, float]], _Spell, _Spell]] = {
    "accuracy": (_accuracy, "{:.4f}".format, "{:.2f}".format),
    "epoch": (_epoch, _in_s, _in_s),
    "speed_up": (_speed_up, _times, _times),
}
"""By the field that names its parts: a row's text and value, how it is spelled, and the book's."""
