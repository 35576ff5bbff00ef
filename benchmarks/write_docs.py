"""Write docs/benchmarks.md, reliability.md and book.md, from benchmarks/results and notes.md alone.

    python benchmarks/write_docs.py

It starts nothing and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from notes import read_notes
from pages import (
    book,
    cable,
    engine,
    hybridize,
    memory,
    overhead,
    processes,
    profile,
    reliability,
    scaling,
    speed,
    uneven,
)
from records import RESULTS, ROOT, load

PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
RELIABILITY = ROOT / "docs" / "reliability.md"
BOOK = ROOT / "docs" / "book.md"
HEAD = """# Benchmarks

This page is written by `python benchmarks/write_docs.py` from the files in `benchmarks/results`;
don't edit it. Explanations stand in `benchmarks/notes.md`."""

Section = Callable[[dict[str, Any], Mapping[str, str]], str]
SECTIONS: dict[str, Section] = {
    "training_speed": speed.section,
    "gains": speed.gains,
    "batch_norm": speed.batch_norm,
    "scaling_lenet": scaling.section,
    "scaling_resnet18": scaling.section,
    "step_overhead": overhead.section,
    "memory": memory.section,
    "step_profile": profile.section,
    "uneven_devices": uneven.section,
    "processes": processes.section,
    "cable": cable.section,
    "hybridize": hybridize.section,
    "engine_experiments": engine.section,
}
PICTURES = ("scaling_lenet", "scaling_resnet18")
RELIABILITY_SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kills": reliability.killed,
    "checkpoints": reliability.saved,
}


def main() -> None:
    """Write the pages."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(RESULTS, read_notes()))
    for name in PICTURES:
        document = load(name)
        if document is not None:
            scaling.draw(document, IMAGES)
    RELIABILITY.write_text(reliability_page(RESULTS))
    found = load("book")
    if found is not None:
        BOOK.write_text(book.page(found, read_notes(), IMAGES))


def page(results: Path, notes: Mapping[str, str]) -> str:
    """Return the page: a section for each result file that is there."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        document = load(name, results)
        if document is not None:
            parts.append(section(document, notes))
    return "\n\n".join(parts) + "\n"


def reliability_page(results: Path) -> str:
    """Return the page on reliability, likewise."""
    documents = {name: load(name, results) for name in RELIABILITY_SECTIONS}
    sections = [
        RELIABILITY_SECTIONS[name](document)
        for name, document in documents.items()
        if document is not None
    ]
    return reliability.page(*sections)


if __name__ == "__main__":
    main()
