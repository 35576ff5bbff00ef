"""Write the pages of docs that have figures from result files and notes.

    python benchmarks/write_docs.py

It measures nothing: pages are made of `results/*.json`, `notes.md` and `templates`. Notes have no
measured figures, which would be wrong after the next run.
"""

from __future__ import annotations

import csv
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

import book_compared
import measure
import readme_picture
from benchmark import FOLDER, RESULTS, ROOT, load
from evenstep.bench import pictures, summarise
from evenstep.bench.tables import Table, number
from evenstep.limits import BOOK_EXPERIMENTS
from evenstep.reproduce import Experiment, experiments
from evenstep.reproduce import pictures as book_pictures
from gpu import tables as kit
from specs import engine, overhead, speed, text, versions
from wording import in_todays_words

DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
PARTS = ("training", "text", "steps", "layouts", "engine", "portable")
PAGES = (
    *("benchmarks", *(f"benchmarks_{part}" for part in PARTS)),
    *("reliability", "kinds", "public_scripts", "versions"),
)
FILES = (
    *(*measure.BENCHMARKS, "chargpt", "gains", "batch_norm"),
    *("scaling_lenet", "scaling_resnet18", "gpu", "public_scripts", "versions"),
)
NOTES = (
    *(
        "method",
        "text",
        "lenet",
        "resnet18",
        "gains",
        "batch_norm",
        "step_overhead",
        "stages",
        "owners",
        "memory",
        "recording",
    ),
    *("step_profile", "uneven_devices", "processes", "cable", "hybrid", "engine"),
    *(f"engine.{experiment}" for experiment in engine.FINDINGS),
    *(f"book.{experiment}" for experiment in BOOK_EXPERIMENTS),
)
_FIGURE = re.compile(r"\d+\.\d+|\d\s*(?:%|×|x\b|ms\b|s\b|[MGk]i?B\b|examples/s)")


def main() -> None:
    """Write the pages and their pictures."""
    notes = parse_notes((FOLDER / "notes.md").read_text(encoding="utf-8"))
    for name in PAGES:
        (DOCS / f"{name}.md").write_text(page(name, RESULTS, notes), encoding="utf-8")
    if document := load("step_overhead"):
        insert(DOCS / "architecture.md", overhead.tables(document)["calls"].markdown())
    book = load("book")
    if book and (document := load("book_compared")):
        insert(DOCS / "compare.md", book_compared.section(document, book["parts"]))
    for name in ("scaling_lenet", "scaling_resnet18"):
        if document := load(name):
            pictures.draw_scaling(document, IMAGES / f"{name}.png")
    if document := load("stages"):
        timelines = [run["timeline"] for run in document["runs"] if run["part"] == "stages.8"]
        pictures.draw_stages(timelines[-1], IMAGES / "stages.png")
    if book:
        for name in book_pictures.TITLES:
            if drawn := book_pictures.draw(name, book["parts"]):
                (IMAGES / f"book_{name}.svg").write_text(drawn, encoding="utf-8")
        if drawn := readme_picture.draw(book["parts"]):
            (IMAGES / "readme_accuracies.svg").write_text(drawn, encoding="utf-8")
        (DOCS / "book.md").write_text(book_page(book, notes), encoding="utf-8")


def insert(file: Path, table: str) -> None:
    """Write a table into a page, between the lines that mark its place."""
    before, _, rest = file.read_text(encoding="utf-8").partition("<!-- figures -->\n")
    _, _, after = rest.partition("<!-- end -->")
    text = f"{before}<!-- figures -->\n{table}\n<!-- end -->{after}"
    file.write_text(text, encoding="utf-8")


def page(name: str, results: Path, notes: Mapping[str, str]) -> str:
    """Return a page, with a section for each result file that exists."""
    documents = {name: load(name, results) for name in FILES}
    return render(
        name,
        notes,
        found=documents,
        tables={
            name: one.tables(documents[name])
            for name, one in measure.BENCHMARKS.items()
            if documents[name]
        }
        | ({"gpu": kit.tables(documents["gpu"])} if documents["gpu"] else {}),
        claims=Table(("claim", "test"), claims(), 2).markdown(),
        ratios=speed.ratios,
        failures=speed.failures,
        text_tables=text.tables,
        scaled=speed.scaling,
        parts_of_time=speed.parts_of_time,
        scripts=scripts,
        versions=versions,
        summary=summary,
    )


def summary(documents: Mapping[str, Any]) -> Table:
    """Return the rows that a reader wants first: speeds beside DDP, and a step's overhead."""
    rows = []
    for name in ("training_speed", "text_speed", "chargpt"):
        found = (text if name != "training_speed" else speed).tables(documents[name])
        for table in (key for key in found if key.endswith(".ratios")):
            rows += [
                [f"{table.removesuffix('.ratios')}: {row[0]}", *row[2:4]]
                for row in found[table].rows
                if row[0].startswith("two devices over DDP")
            ]
    for row in overhead.tables(documents["step_overhead"])["steps"].rows[1:3]:
        devices = row[0].partition(", ")[2]
        rows.append([f"a step on {devices} over a plain loop's time", *row[3:5]])
    return Table(("", "median", "extremes"), rows)


def scripts(document: Mapping[str, Any]) -> Table:
    """Return a table of the pairs of public scripts: what differs, the verdict, and the reason."""
    rows = []
    for run in document["runs"]:
        place = f"https://github.com/{run['repository']}/blob/{run['revision']}/{run['script']}"
        one, other = map(shlex.split, run["runs"])
        verdict, reason = map(in_todays_words, run["output"][:2])
        verdict = verdict.partition(", first in update")[0]
        rows.append(
            [
                f"[{run['script'].rpartition('/')[2]}]({place}), {run['framework']}",
                " → ".join(f"`{part}`" if part else "as it is" for part in unlike(one, other)),
                f"**{verdict}**: {reason.strip()}",
                run["reason"],
            ]
        )
    return Table(("script", "the two runs (A → B)", "verdict", "why"), rows, 4)


def unlike(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Return the words that only one of two commands has, with their options."""
    parts: tuple[list[str], list[str]] = ([], [])
    for kind, *places in difflib.SequenceMatcher(a=one, b=other, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        for part, words, begin, end in zip(
            parts, (one, other), places[::2], places[1::2], strict=True
        ):
            is_value = begin > 0 and words[begin:end] and not words[begin].startswith("--")
            has_option = is_value and words[begin - 1].startswith("--")
            part += words[begin - bool(has_option) : end]
    return " ".join(parts[0]), " ".join(parts[1])


def claims() -> list[list[str]]:
    """Return what README and docs claim, each with the test that shows it."""
    with (FOLDER / "claims.csv").open(encoding="utf-8", newline="") as file:
        return [[row["claim"], f"`{row['test']}`"] for row in csv.DictReader(file)]


def book_page(document: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Return the page on the book's experiments."""
    figures = document["parts"]

    def drawn(name: str) -> bool:
        return book_pictures.draw(name, figures) is not None

    def table(experiment: Experiment) -> Table:
        rows = [[row.text, row.book, row.here, row.why] for row in experiment.rows(figures)]
        return Table(("", "the book", "here", "what differs, and why"), rows, 4)

    return render(
        "book",
        notes,
        document=document,
        figures=figures,
        experiments=experiments(document["size"]),
        table=table,
        drawn=drawn,
        titles=book_pictures.TITLES,
    )


def render(name: str, notes: Mapping[str, str], **values: Any) -> str:
    """Return a page from its template, with a comment for those who would edit the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = number
    environment.filters["median"] = lambda values: summarise([*values]).median
    template = environment.get_template(f"{name}.md.jinja")
    text = template.render(note=lambda name: notes.get(name, ""), rerun=rerun, **values)
    title, _, rest = text.strip().partition("\n")
    comment = f"<!-- benchmarks/write_docs.py writes this page from templates/{name}.md.jinja -->"
    return re.sub(r"\n{3,}", "\n\n", f"{title}\n\n{comment}\n\n{rest}\n")


def rerun(command: str) -> str:
    """Return the command that today measures what a recorded command measured."""
    scripts = "|".join(measure.BENCHMARKS)
    command = command.replace(" --runs ", " --rounds ")
    return re.sub(rf"benchmarks/({scripts})\.py", r"benchmarks/measure.py \1", command)


def parse_notes(text: str) -> dict[str, str]:
    """Split `text` at its `## name` lines; what comes before the first is for writers.

    Raises:
        ValueError: the pages have no place for a name, or a note has a measured figure.
    """
    _, *parts = re.split(r"^## +(.+)$", text, flags=re.MULTILINE)
    notes = {name.strip(): body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
    for name, body in notes.items():
        if name not in NOTES:
            raise ValueError(f"notes.md has a section {name!r}: expected one of {', '.join(NOTES)}")
        if figure := _FIGURE.search(body):
            raise ValueError(
                f"the note {name!r} has the figure {figure[0]!r}, which the next run may change: "
                f"name the row of the table that shows it"
            )
    return notes


if __name__ == "__main__":
    main()
