"""The section on the engine: a table for each of the book's experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import finding_rows
from evenstep.book.reproduce.book import EXPERIMENTS
from pages.common import joined, note, origin
from text import table

_TEXT = """The experiments of Dive into Deep Learning (with MXNet), sections "Asynchronous
Computation" and "Automatic Parallelism", with `evenstep.Engine`. `the book` is what the book
printed, on its authors' machine; what compares across machines are the gains. Devices are `cpu:0`
and `cpu:1` with one intra-op thread each. Every figure comes from a fresh process, in an order that
rotates from round to round; tables show the median of the rounds, and the least and the most. A
ratio of two measurements is taken within each round, and its median is held against the target.
The limits are two bare Python threads, one intra-op thread each, that do the same without the
engine."""

Settings = Mapping[str, Any]


def _queued(sizes: Settings) -> str:
    n = sizes["size"]
    return (
        f"One product of {n} × {n} at a time: when `submit` returned, and when the product was "
        f"there. Medians of {sizes['repeats']} in each process."
    )


def _adds(sizes: Settings) -> str:
    return f"{sizes['count']:,} × `y = x + 1`, x of {sizes['size']} × {sizes['size']}."


def _products(sizes: Settings) -> str:
    return f"The same with {sizes['count']:,} products of {sizes['size']} × {sizes['size']}."


def _together(sizes: Settings) -> str:
    n = sizes["size"]
    return (
        f"{sizes['count']} products of {n} × {n} for each device: one device after the other, or "
        f"both together."
    )


def _copies(sizes: Settings) -> str:
    n, inner = sizes["size"], sizes["inner"]
    return (
        f"{sizes['count']} products of {n} × {inner} and {inner} × {n} on `cpu:0`, copied to the "
        f"memory of `cpu:1:own` on its copy lane. Medians of {sizes['repeats']} in each process."
    )


def _memory(sizes: Settings) -> str:
    return (
        f"{sizes['batches']} batches of {sizes['examples']} × 512, each trained on by the book's "
        f"MLP. Growth of resident memory against that after one batch. Batches made "
    )


def _cost(sizes: Settings) -> str:
    return f"{sizes['tasks']:,} tasks that do nothing, two lanes."


_Told = tuple[str, str, Callable[[Settings], str]]
TOLD: dict[str, _Told] = {
    "queued": ("Queued against finished", "queued", _queued),
    "waiting.add": ("Waiting each time against once: sums", "waiting.add", _adds),
    "waiting.mm": ("Waiting each time against once: products", "waiting.mm", _products),
    "together": ("Two batches of products on two devices", "together", _together),
    "copies.square": ("Computing and copying: the book's products", "copies.square", _copies),
    "copies.thin": ("Computing and copying: thin products", "copies.thin", _copies),
    "memory.front": (
        "Memory: batches made by the front end",
        "memory",
        lambda sizes: _memory(sizes) + "by the front end.",
    ),
    "memory.tasks": (
        "Memory: batches made by tasks",
        "memory",
        lambda sizes: _memory(sizes) + "by tasks, as the book's are.",
    ),
    "cost": ("What a task costs", "cost", _cost),
}
"""For each experiment its title, the name of its settings, and what tells what was done."""


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    rounds = len({run["round"] for run in document["runs"]})
    return joined(
        "## The engine: the book's experiments",
        origin(document),
        _TEXT,
        f"Rounds: {rounds}.",
        note(notes, "engine"),
        *(_experiment(name, document, notes) for name in EXPERIMENTS),
    )


def _experiment(name: str, document: dict[str, Any], notes: Mapping[str, str]) -> str:
    title, sizes, tell = TOLD[name]
    rows = [finding_rows.row(finding, document["runs"]) for finding in EXPERIMENTS[name]]
    return joined(
        f"### {title}",
        tell(document["settings"][sizes]),
        table(finding_rows.HEAD, rows),
        note(notes, f"engine.{name}"),
    )
