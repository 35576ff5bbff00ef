"""docs/book.md: the book's experiments on this machine, from what `evenstep reproduce` measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.book.reproduce import Experiment, experiments, pictures
from pages.common import joined, note
from text import table

HEAD = """# The book's experiments

*Dive into Deep Learning*'s chapter on performance, run on evenstep. `evenstep reproduce` measures
all of it on your machine and writes a report like this one, with the same tables and pictures;
`evenstep reproduce --quick` shows what there is in less than five minutes.

This page is written by `python benchmarks/write_docs.py` from `benchmarks/results/book.json`, which
is the `figures.json` of that command. "The book" are the figures printed in its MXNet edition,
measured on CPUs and GPUs of its time; they say what is to be learnt, not what is to be reached."""


def page(document: Mapping[str, Any], notes: Mapping[str, str], images: Path) -> str:
    """Return the page, and write its pictures into `images`."""
    known = experiments(document["size"])
    machine = document["machine"]
    where = (
        f"Measured on {machine['cpu']}, {machine['usable_cores']} cores, torch "
        f"{machine['packages']['torch']}, begun {machine['date_utc']} UTC at revision "
        f"{machine['git_revision']}{_went_on(document)}."
    )
    return (
        joined(HEAD, where, *(_section(one, document["parts"], notes, images) for one in known))
        + "\n"
    )


def _went_on(document: Mapping[str, Any]) -> str:
    runs = (f"{one['date_utc']} at {one['git_revision']}" for one in document.get("went_on", ()))
    return "".join(f", gone on with {run}" for run in runs)


def _section(
    experiment: Experiment, figures: Mapping[str, Any], notes: Mapping[str, str], images: Path
) -> str:
    head = f"## {experiment.title}"
    command = f"```bash\nevenstep reproduce --only {experiment.name}\n```"
    asked = f"{experiment.question} (Section {experiment.section})"
    if not experiment.can_be_shown(figures):
        return joined(head, asked, command, "Not measured here yet.")
    rows = [[row.text, row.book, row.here, row.why] for row in experiment.rows(figures)]
    missing = [part.label for part in experiment.missing(figures)]
    return joined(
        head,
        asked,
        command,
        table(("", "the book", "here", "what differs, and why"), rows, text_columns=4),
        [f"Not measured here yet: {', '.join(missing)}."] if missing else [],
        note(notes, f"book.{experiment.name}"),
        [line for name in experiment.pictures for line in _picture(name, figures, images)],
    )


def _picture(name: str, figures: Mapping[str, Any], images: Path) -> list[str]:
    drawn = pictures.draw(name, figures)
    if drawn is None:
        return []
    file = images / f"book_{name}.svg"
    file.write_text(drawn)
    return [f"![{pictures.title(name)}](images/{file.name})"]
