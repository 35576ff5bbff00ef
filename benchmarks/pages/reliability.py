"""The page on what was killed, and what came of it."""

from __future__ import annotations

from typing import Any

from pages.common import joined, origin
from rounds import summarise
from text import number, spread, table

KINDS = {
    "worker": "any process, once a random step is saved",
    "writer": "the process that saves, in the middle of a checkpoint",
}
HEAD = """# Reliability

This page is written by `python benchmarks/write_docs.py` from `benchmarks/results/kills.json`;
don't edit it."""


def page(document: dict[str, Any]) -> str:
    """Return the page."""
    settings = document["settings"]
    text = (
        f"`evenstep train --processes {settings['processes']} --max-restarts 3` for "
        f"{settings['steps']} steps, with a checkpoint every {settings['checkpoint_every']}. One "
        f"process is killed (SIGKILL). The launcher starts both again, and they go on from the "
        f"newest checkpoint. A run is well when it ends by itself with the fingerprint of one "
        f"process that nothing happened to, and no process is left."
    )
    head = ("killed", "runs", "well", "seconds from start to end", "spread")
    rows = [_row(document["runs"], kind) for kind in KINDS]
    return joined(HEAD, "## Killed processes", origin(document), text, table(head, rows)) + "\n"


def _row(runs: list[dict[str, Any]], kind: str) -> list[str]:
    own = [run for run in runs if run["kind"] == kind]
    well = [run for run in own if run["same"] and not run["left"] and run["killed"] == 1]
    seconds = summarise([run["seconds"] for run in own])
    return [KINDS[kind], str(len(own)), str(len(well)), number(seconds.median), spread(seconds)]
