"""Write docs/benchmarks.md and docs/reliability.md, from benchmarks/results and notes.md alone.

    python benchmarks/write_docs.py

It starts nothing and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from notes import read_notes
from pages import engine, memory, overhead, processes, profile, reliability, speed, uneven
from records import RESULTS, ROOT, load

PAGE = ROOT / "docs" / "benchmarks.md"
RELIABILITY = ROOT / "docs" / "reliability.md"
HEAD = """# Benchmarks

This page is written by `python benchmarks/write_docs.py` from the files in `benchmarks/results`;
don't edit it. Explanations stand in `benchmarks/notes.md`."""

Section = Callable[[dict[str, Any], Mapping[str, str]], str]
SECTIONS: dict[str, Section] = {
    "training_speed": speed.section,
    "step_overhead": overhead.section,
    "memory": memory.section,
    "step_profile": profile.section,
    "uneven_devices": uneven.section,
    "processes": processes.section,
    "engine_experiments": engine.section,
}


def main() -> None:
    """Write the pages."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(RESULTS, read_notes()))
    kills = load("kills", RESULTS)
    if kills is not None:
        RELIABILITY.write_text(reliability.page(kills))


def page(results: Path, notes: Mapping[str, str]) -> str:
    """Return the page: a section for each result file that is there."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        document = load(name, results)
        if document is not None:
            parts.append(section(document, notes))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
