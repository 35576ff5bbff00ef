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
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

import glance_picture
import measure
import published
import readme_picture
import scale
from benchmark import FOLDER, RESULTS, ROOT, load
from evenstep.bench import pictures, summarise
from evenstep.bench.tables import Table, number
from evenstep.reproduce import experiments
from evenstep.reproduce import pictures as book_pictures
from evenstep.reproduce.rows import table as book_table
from gpu import tables as kit
from specs import overhead, speed, text, versions

DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
TEMPLATES = FOLDER / "templates"
PAGES = sorted({file.name.partition(".")[0] for file in TEMPLATES.glob("*.md.jinja")} - {"book"})
_FIGURE = re.compile(r"\d+\.\d+|\d\s*(?:%|×|x\b|ms\b|s\b|[MGk]i?B\b|examples/s)")
_ANOTHER = re.compile(
    r"\banother (number|order|mode|precision|loss|scale|experiment|learning rate)\b"
)
_OTHER = re.compile(
    r"\b(begin with|called with|has|have|see|gives?|and) other "
    r"(weights|arguments|examples|settings|outputs|lengths|gradients)\b"
)


def main() -> None:
    """Write the pages and their pictures."""
    notes = parse_notes((FOLDER / "notes.md").read_text(encoding="utf-8"))
    pages = {name: page(name, RESULTS, notes) for name in PAGES}
    book = load("book")
    if book:
        pages["book"] = book_page(book, notes)
    if unused := [name for name, note in notes.items() if note not in "".join(pages.values())]:
        raise SystemExit(f"notes.md has {', '.join(unused)}, which no page has a place for")
    for name, content in pages.items():
        (DOCS / f"{name}.md").write_text(content, encoding="utf-8")
    if document := load("step_overhead"):
        insert(DOCS / "architecture.md", overhead.tables(document)["calls"].markdown())
    if book and (document := load("book_compared")):
        insert(DOCS / "compare.md", compared(document, book["parts"]))
    draw(book, stored(RESULTS))


def draw(book: Mapping[str, Any] | None, documents: Mapping[str, Any]) -> None:
    """Draw the pictures of the results that there are."""
    glance = glance_picture.draw(documents)
    (IMAGES / "benchmarks_glance.svg").write_text(glance, encoding="utf-8")
    for name in ("scaling_lenet", "scaling_resnet18"):
        if document := load(name):
            pictures.draw_scaling(document, IMAGES / f"{name}.png")
    scale.write(IMAGES)
    if document := load("stages"):
        timelines = [run["timeline"] for run in document["runs"] if run["part"] == "stages.8"]
        pictures.draw_stages(timelines[-1], IMAGES / "stages.png")
    if book:
        parts = book["parts"]
        drawn = {f"book_{name}": book_pictures.draw(name, parts) for name in book_pictures.TITLES}
        drawn["readme_accuracies"] = readme_picture.draw(parts)
        for name, svg in drawn.items():
            if svg:
                (IMAGES / f"{name}.svg").write_text(svg, encoding="utf-8")


def insert(file: Path, table: str) -> None:
    """Write a table into a page, between the lines that mark its place."""
    before, _, rest = file.read_text(encoding="utf-8").partition("<!-- figures -->\n")
    _, _, after = rest.partition("<!-- end -->")
    content = f"{before}<!-- figures -->\n{table}\n<!-- end -->{after}"
    file.write_text(content, encoding="utf-8")


def page(name: str, results: Path, notes: Mapping[str, str]) -> str:
    """Return a page, with a section for each result file that exists."""
    documents = stored(results)
    makers = {one.name: one.tables for one in measure.BENCHMARKS.values()}
    makers |= {"portable_avx2": makers["portable"], "gpu": kit.tables}
    return render(
        name,
        notes,
        found=documents,
        tables={name: make(documents[name]) for name, make in makers.items() if documents[name]},
        claims=Table(("claim", "test"), claims(), 2).markdown(),
        ratios=speed.ratios,
        failures=speed.failures,
        text_tables=text.tables,
        scaled=speed.scaling,
        parts_of_time=speed.parts_of_time,
        scripts=scripts,
        versions=versions,
        published=published.table,
        thousand=scale.thousand,
        lost_time=scale.failures,
        summary=summary,
    )


def stored(results: Path) -> defaultdict[str, Any]:
    """Return the result files by their names; None for one that doesn't exist."""
    found: defaultdict[str, Any] = defaultdict(lambda: None)
    return found | {file.stem: load(file.stem, results) for file in results.glob("*.json")}


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
        link = f"[{run['script'].rpartition('/')[2]}]({place}), {run['framework']}"
        parts = (f"`{part}`" if part else "as it is" for part in unlike(*run["runs"]))
        rows.append([link, " → ".join(parts), verdict_of(run), run["reason"]])
    return Table(("script", "the two runs (A → B)", "verdict", "why"), rows, 4)


def verdict_of(run: Mapping[str, Any]) -> str:
    """Return what `evenstep compare` said of two runs, in the words that it uses today."""
    verdict, reason = map(in_todays_words, run["output"][:2])
    return f"**{verdict.partition(', first in update')[0]}**: {reason.strip()}"


def in_todays_words(line: str) -> str:
    """Return a line that an earlier version wrote, as this one would write it."""
    return _OTHER.sub(r"\1 different \2", _ANOTHER.sub(r"a different \1", line))


def unlike(one: str, other: str) -> tuple[str, str]:
    """Return the words that only one of two commands has, with their options."""
    commands = shlex.split(one), shlex.split(other)
    parts: tuple[list[str], list[str]] = ([], [])
    matcher = difflib.SequenceMatcher(None, *commands, autojunk=False)
    for kind, a_begin, a_end, b_begin, b_end in matcher.get_opcodes():
        if kind != "equal":
            for part, words, begin, end in (
                (parts[0], commands[0], a_begin, a_end),
                (parts[1], commands[1], b_begin, b_end),
            ):
                is_value = begin > 0 and words[begin:end] and not words[begin].startswith("--")
                has_option = is_value and words[begin - 1].startswith("--")
                part += words[begin - bool(has_option) : end]
    return " ".join(parts[0]), " ".join(parts[1])


def claims() -> list[list[str]]:
    """Return what README and docs claim, each with the test that shows it."""
    with (FOLDER / "claims.csv").open(encoding="utf-8", newline="") as file:
        return [[row["claim"], f"`{row['test']}`"] for row in csv.DictReader(file)]


def compared(document: Mapping[str, Any], book: Mapping[str, Any]) -> str:
    """Return the part of docs/compare.md on the book's two runs, and what the remedies bring."""
    rows = [[run["title"], verdict_of(run)] for run in document["runs"]]

    def accuracies(name: str) -> str:
        return ", ".join(f"{accuracy:.2f}" for accuracy in book[name]["accuracies"])

    table = Table(("both runs have", "`evenstep compare` says"), rows, 2)
    template = _environment().get_template("book_compared.jinja")
    return template.render(document=document, table=table, accuracies=accuracies)


def book_page(document: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Return the page on the book's experiments."""
    figures = document["parts"]
    return render(
        "book",
        notes,
        document=document,
        figures=figures,
        experiments=experiments(document["size"]),
        table=lambda experiment: book_table(experiment.rows(figures)),
        drawn=lambda name: book_pictures.draw(name, figures) is not None,
        titles=book_pictures.TITLES,
    )


def render(name: str, notes: Mapping[str, str], **values: Any) -> str:
    """Return a page from its template, with a comment for those who would edit the page."""
    template = _environment().get_template(f"{name}.md.jinja")
    content = template.render(note=lambda name: notes.get(name, ""), rerun=rerun, **values)
    title, _, rest = content.strip().partition("\n")
    comment = f"<!-- benchmarks/write_docs.py writes this page from templates/{name}.md.jinja -->"
    return re.sub(r"\n{3,}", "\n\n", f"{title}\n\n{comment}\n\n{rest}\n")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = number
    environment.filters["median"] = lambda values: summarise([*values]).median
    return environment


def rerun(command: str) -> str:
    """Return the command that today measures what a recorded command measured."""
    names = "|".join(measure.BENCHMARKS)
    command = command.replace(" --runs ", " --rounds ")
    return re.sub(rf"benchmarks/({names})\.py", r"benchmarks/measure.py \1", command)


def parse_notes(content: str) -> dict[str, str]:
    """Split `content` at its `## name` lines; what comes before the first is for writers.

    Raises:
        ValueError: a note has a measured figure.
    """
    _, *parts = re.split(r"^## +(.+)$", content, flags=re.MULTILINE)
    notes = {name.strip(): body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
    for name, body in notes.items():
        if figure := _FIGURE.search(body):
            raise ValueError(
                f"the note {name!r} has the figure {figure[0]!r}, which the next run may change: "
                f"name the row of the table that shows it"
            )
    return notes


if __name__ == "__main__":
    main()
