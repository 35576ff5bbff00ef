"""Makes the rows of the report from measured figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.bench import summarise
from evenstep.bench.tables import NOTHING, with_unit
from evenstep.errors import counted
from evenstep.reproduce.findings import read_findings
from evenstep.reproduce.plan import Figures, Row, Size

CAVEATS: Mapping[Size, str] = {
    "full": "The initial weights and the order of the examples differ from the book's.",
    "quick": "Quick run: few examples and epochs; accuracies are no result.",
}
_BOOK_EPOCHS = 4
_EPOCH = 60_000  # examples of Fashion-MNIST


def measured(prefixes: Mapping[str, str], figures: Figures) -> list[Row]:
    """Return the rows of findings that were measured; `prefixes` are theirs by experiment."""
    runs = [{"round": 0, "key": key, **found} for key, found in figures.items()]
    rows = []
    for name, prefix in prefixes.items():
        for finding in read_findings()[name]:
            if finding.in_report and (values := finding.values(runs)):
                value = summarise(values).median
                rows.append(
                    Row(
                        text=prefix + finding.text,
                        book=finding.book_text,
                        here=with_unit(value, finding.unit),
                        why=finding.reason(value).format(**figures.get(name, {})),
                    )
                )
    return rows


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
        for kind, make in _KINDS.items():
            keys = [row[kind]] if isinstance(row.get(kind), str) else row.get(kind, [None])
            if all(key in figures for key in keys):
                made = make(row, *(figures[key] for key in keys))
                why = made.why + _reason(row, made.value, figures)
                here = made.here
                if kind == "accuracy" and size == "quick":
                    here, why = f"{here} (quick)", CAVEATS["quick"]
                more = {**words, "devices": _devices(figures[keys[0]])}
                found.append(
                    Row(
                        text=made.text.format(**more),
                        book=made.book,
                        here=here,
                        why=why.format(**more),
                    )
                )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Made:
    """What a row is made of."""

    text: str  # what the figure is
    book: str = NOTHING  # the book's figure
    here: str  # this machine's figure
    value: float = 0.0  # this machine's figure as a number, which decides how it is explained
    why: str = ""  # what stands before the explanation


def _reason(row: Mapping[str, Any], value: float, figures: Figures) -> str:
    """Return what explains a figure of this value: `below` is a number or a different training."""
    below = row.get("below", 1 if "same" in row else None)
    if isinstance(below, str):
        below = figures[below]["accuracies"][-1] if below in figures else None
    return str(row.get("why", "") if below is None or value >= below else row.get("why_below", ""))


def _devices(training: Mapping[str, Any]) -> str:
    return " and ".join(training.get("shares", ())) or "CPU devices"


def _accuracy(row: Mapping[str, Any], training: Mapping[str, Any]) -> _Made:
    """Compare the last epoch or, beside a figure of the book, the book's last epoch."""
    accuracies = training["accuracies"][: _BOOK_EPOCHS if "book" in row else None]
    return _Made(
        text=f"{row['text']}: accuracy after {counted(len(accuracies), 'epoch')}",
        book=f"{row['book']:.2f}" if "book" in row else NOTHING,
        here=f"{accuracies[-1]:.4f}",
        value=accuracies[-1],
    )


def _epoch(row: Mapping[str, Any], training: Mapping[str, Any]) -> _Made:
    return _Made(
        text=f"{row['text']}: seconds for {_EPOCH:,} examples",
        book=with_unit(row["book"], "s"),
        here=with_unit(_epoch_s(training), "s"),
        value=_epoch_s(training),
    )


def _speed_up(row: Mapping[str, Any], one: Mapping[str, Any], two: Mapping[str, Any]) -> _Made:
    value = _epoch_s(one) / _epoch_s(two)
    return _Made(
        text=row["text"],
        book=with_unit(row["book"], "×"),
        here=with_unit(value, "×"),
        value=value,
    )


def _same(row: Mapping[str, Any], *trainings: Mapping[str, Any]) -> _Made:
    """Compare fingerprints; a row on different ones has no other explanation."""
    prints = [f"`{one['fingerprint'][:12]}…`" for one in trainings]
    if len(set(prints)) == 1:
        return _Made(text=row["text"], here="equal", value=1.0, why=f"{prints[0]} ")
    broken = f"{', '.join(prints)}: the promise is broken; please report it, with figures.json."
    return _Made(text=row["text"], here="DIFFERENT", why=broken)


_KINDS: Mapping[str, Callable[..., _Made]] = {
    "accuracy": _accuracy,
    "epoch": _epoch,
    "speed_up": _speed_up,
    "same": _same,
}
"""What makes a row, by the field that names its parts."""


def _epoch_s(training: Mapping[str, Any]) -> float:
    """Return the seconds of an epoch with as many examples as the book's."""
    examples = training["training"]["examples"] or _EPOCH
    seconds: list[float] = training["seconds"]
    return sum(seconds) / len(seconds) * _EPOCH / examples
