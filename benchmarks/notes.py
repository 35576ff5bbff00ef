"""Hand-written explanations for the generated page, without hand-written figures.

`notes.md` holds sections `## name`; the page puts each where its name belongs. A measured figure in
one would go stale at the next run, so it is refused: point at the table instead.
"""

from __future__ import annotations

import re
from pathlib import Path

from evenstep.book.reproduce import EXPERIMENTS as OF_BOOK
from evenstep.book.reproduce.book import EXPERIMENTS

NAMES = (
    "method",
    "lenet",
    "resnet18",
    "gains",
    "batch_norm",
    "step_overhead",
    "memory",
    "step_profile",
    "uneven_devices",
    "processes",
    "cable",
    "hybrid",
    "engine",
    *(f"engine.{experiment}" for experiment in EXPERIMENTS),
    *(f"book.{name}" for name in OF_BOOK),
)
_FILE = Path(__file__).resolve().parent / "notes.md"
_FIGURE = re.compile(r"\d+\.\d+|\d\s*(?:%|×|x\b|ms\b|s\b|[MGk]i?B\b|examples/s)")


def read_notes(file: Path = _FILE) -> dict[str, str]:
    """Return each section's text by its name; no file, no notes."""
    return parse_notes(file.read_text()) if file.exists() else {}


def parse_notes(text: str) -> dict[str, str]:
    """Split `text` at its `## name` lines; what stands before the first is for its writers.

    Raises:
        ValueError: a name that the page has no place for, or a measured figure.
    """
    _, *parts = re.split(r"^## +(.+)$", text, flags=re.MULTILINE)
    notes = {name.strip(): body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
    for name, body in notes.items():
        if name not in NAMES:
            raise ValueError(f"notes.md has a section {name!r}: the page has {', '.join(NAMES)}")
        if figure := _FIGURE.search(body):
            raise ValueError(
                f"the note {name!r} holds the figure {figure[0]!r}, which the next run may change: "
                f"say which row of which table shows it"
            )
    return notes
