"""Makes the rows of the report from measured figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.bench import summarise
from evenstep.bench.lineup import counted
from evenstep.bench.tables import NOTHING, with_unit
from evenstep.book.reproduce.findings import read_findings
from evenstep.book.reproduce.plan import Figures, Row, Size

CAVEATS: Mapping[Size, str] = {
    "full": "Other initial weights and another order of the examples than the book's.",
    "quick": "Quick run: few examples and epochs; accuracies are no result.",
}
_BOOK_EPOCHS = 4
_EPOCH = 60_000  # examples of Fashion-MNIST


def measured(prefixes: Mapping[str, str], figures: Figures) -> list[Row]:
    """Return the rows of findings that were measured; `prefixes` are theirs by experiment."""
    runs = [{"round": 0, "key": key, **found} for key, found in figures.items()]
    return [
        Row(
            text=prefix + finding.text,
            book=finding.book_text,
            here=with_unit(summarise(values).median, finding.unit),
            why=finding.why.format(**figures.get(name, {})),
        )
        for name, prefix in prefixes.items()
        for finding in read_findings()[name]
        if finding.in_report and (values := finding.values(runs))
    ]


def trained(
    rows: Sequence[Mapping[str, Any]], words: Mapping[str, str], figures: Figures
) -> list[Row]:
    """Return the rows on trainings that were measured; `words` fill in their texts."""
    found = []
    for row in rows:
        for kind, make in _KINDS.items():
            keys = [row[kind]] if isinstance(row.get(kind), str) else row.get(kind, [None])
            if all(key in figures for key in keys):
                text, book, here = make(row, *(figures[key] for key in keys))
                why = row.get("why", "").format(**words)
                found.append(Row(text=text.format(**words), book=book, here=here, why=why))
    return found


def _accuracy(row: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[str, str, str]:
    """Compare the last epoch or, beside a figure of the book, the book's last epoch."""
    accuracies = training["accuracies"][: _BOOK_EPOCHS if "book" in row else None]
    text = f"{row['text']}: accuracy after {counted(len(accuracies), 'epoch')}"
    return text, f"{row['book']:.2f}" if "book" in row else NOTHING, f"{accuracies[-1]:.4f}"


def _epoch(row: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[str, str, str]:
    text = f"{row['text']}: seconds for {_EPOCH:,} examples"
    return text, with_unit(row["book"], "s"), with_unit(_epoch_s(training), "s")


def _speed_up(
    row: Mapping[str, Any], one: Mapping[str, Any], two: Mapping[str, Any]
) -> tuple[str, str, str]:
    here = with_unit(_epoch_s(one) / _epoch_s(two), "×")
    return row["text"], with_unit(row["book"], "×"), here


def _same(row: Mapping[str, Any], *trainings: Mapping[str, Any]) -> tuple[str, str, str]:
    prints = [str(one["fingerprint"])[:12] for one in trainings]
    is_same = len(set(prints)) == 1
    here = f"equal: {prints[0]}…" if is_same else f"DIFFERENT: {', '.join(prints)}"
    return row["text"], NOTHING, here


_KINDS: Mapping[str, Callable[..., tuple[str, str, str]]] = {
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
