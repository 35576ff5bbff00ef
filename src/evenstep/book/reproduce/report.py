"""The report: one HTML file, tables and pictures inside; readable on a phone, without network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from evenstep.book.reproduce import pictures
from evenstep.book.reproduce.plan import Experiment, Figures, Row
from evenstep.errors import SaveError
from evenstep.files import write_file

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin-top: 2.5rem }
.table { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left;
  vertical-align: top }
td:nth-child(2), td:nth-child(3) { white-space: nowrap }
td:nth-child(3) { font-weight: 600 }
td:nth-child(4) { min-width: 14rem; color: color-mix(in srgb, currentcolor 75%, transparent) }
figure { margin: 1.5rem 0 } figcaption { font-size: .9rem }
img { width: 100%; height: auto; background: white; border-radius: .3rem }
.note { background: var(--soft); padding: .6rem .8rem; border-radius: .3rem }
nav a { margin-right: .8rem }
@media (max-width: 40rem) {
  th:nth-child(4) { display: none }
  tr { display: grid; grid-template-columns: 1fr 5.5rem 7.5rem;
    border-bottom: 1px solid var(--line) }
  th, td { border: 0 } td:nth-child(4) { grid-column: 1 / -1 }
  td:nth-child(2), td:nth-child(3) { white-space: normal }
}
"""
_HEAD = ("", "the book", "here", "what differs, and why")


def write_report(
    file: Path, experiments: Sequence[Experiment], document: Mapping[str, Any], command: str
) -> None:
    """Write the report of what was measured so far.

    Args:
        file: to write; one that was there is replaced.
        experiments: to report on; those that are not measured yet are named.
        document: size, machine and figures, as `Kept` has them.
        command: that measured them.

    Raises:
        SaveError: it can't be written.
    """
    try:
        write_file(file, page(experiments, document, command))
    except OSError as error:
        raise SaveError(f"{file} can't be written: {error.strerror or error}") from error


def page(experiments: Sequence[Experiment], document: Mapping[str, Any], command: str) -> str:
    """Return the report's HTML."""
    figures: Figures = document["parts"]
    measured = [one for one in experiments if one.can_be_shown(figures)]
    missing = [one.title for one in experiments if not one.can_be_shown(figures)]
    missing += [part.label for one in measured for part in one.missing(figures)]
    links = " ".join(f'<a href="#{one.name}">{escape(one.title)}</a>' for one in measured)
    body = [
        "<h1>The book's experiments on this machine</h1>",
        f"<p>{escape(_machine(document['machine']))}",
        f"Written by <code>{escape(command)}</code>.</p>",
        _note(document["size"], missing),
        f"<nav>{links}</nav>",
        *(_section(one, figures) for one in measured),
        "<h2>Sources</h2><p>“The book” is <em>Dive into Deep Learning</em> (Zhang, Lipton, Li, "
        "Smola), chapter “Computational Performance”, whose figures come from its MXNet edition "
        "with CPUs and GPUs of its time.</p>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            "<title>evenstep: the book's experiments</title>",
            f"<style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _section(experiment: Experiment, figures: Figures) -> str:
    return "\n".join(
        [
            f'<h2 id="{experiment.name}">{escape(experiment.title)}</h2>',
            f"<p>{escape(experiment.question)} (Section {escape(experiment.section)})</p>",
            _table(experiment.rows(figures)),
            *(_picture(name, figures) for name in experiment.pictures),
        ]
    )


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
    lines = [
        "<tr>"
        + "".join(f"<td>{_spelled(cell)}</td>" for cell in (row.text, row.book, row.here, row.why))
        + "</tr>"
        for row in rows
    ]
    return f'<div class="table"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _picture(name: str, figures: Figures) -> str:
    drawn = pictures.draw(name, figures)
    if drawn is None:
        return ""
    data = base64.b64encode(drawn.encode()).decode()
    caption = escape(pictures.title(name))
    return (
        f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _note(size: str, missing: Sequence[str]) -> str:
    notes = []
    if size == "quick":
        notes.append(
            "A quick run: fewer repetitions, few examples and epochs. Bits are compared as ever; "
            "accuracies and times are only a look at what is there."
        )
    if missing:
        notes.append(f"Not measured yet: {', '.join(missing)}.")
    return f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores, torch "
        f"{machine['packages']['torch']}, {machine['date_utc']} UTC."
    )


def _spelled(text: str) -> str:
    """Return text as HTML; what stands between backticks is code."""
    parts = escape(text).split("`")
    return "".join(
        f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)
    )
