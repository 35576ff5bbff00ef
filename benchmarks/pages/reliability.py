"""The page on what was killed and what came of it, and on what saving costs."""

from __future__ import annotations

from typing import Any

from evenstep.bench.rounds import summarise
from pages.common import joined, origin
from text import NOTHING, number, spread, table

KINDS = {
    "worker": "any process, once a random step is saved",
    "writer": "the process that saves, in the middle of a checkpoint",
}
HEAD = """# Reliability

This page is written by `python benchmarks/write_docs.py` from files in `benchmarks/results`; don't
edit it."""


def page(*sections: str) -> str:
    """Return the page."""
    return joined(HEAD, *sections) + "\n"


def killed(document: dict[str, Any]) -> str:
    """Return the section on killed processes."""
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
    return joined("## Killed processes", origin(document), text, table(head, rows))


def saved(document: dict[str, Any]) -> str:
    """Return the section on what saving costs."""
    settings = document["settings"]
    text = (
        f"ResNet-18, batch {settings['batch']}, momentum, two devices; a checkpoint after every "
        f"{settings['every']} of {settings['steps']} steps. A save that is waited for hashes, "
        f"writes and flushes; one aside copies the state, and the writer then takes its share of "
        f"the cores. Where the devices are these cores, that share is what the last column shows "
        f"(the end of the last write is in it); what training no longer waits for is the disk."
    )
    head = ("training", "ms for which `save` holds training up", "spread", "ms a step, with all")
    rows = [
        _saving([run for run in document["runs"] if run["variant"] == variant], label)
        for variant, label in document["variants"].items()
    ]
    return joined("## Checkpoints while training", origin(document), text, table(head, rows))


def _saving(runs: list[dict[str, Any]], label: str) -> list[str]:
    saves = [ms for run in runs for ms in run["saves_ms"]]
    steps = number(summarise([run["step_ms"] for run in runs]).median)
    if not saves:
        return [label, NOTHING, NOTHING, steps]
    return [label, number(summarise(saves).median), spread(summarise(saves)), steps]


def _row(runs: list[dict[str, Any]], kind: str) -> list[str]:
    own = [run for run in runs if run["kind"] == kind]
    well = [run for run in own if run["same"] and not run["left"] and run["killed"] == 1]
    seconds = summarise([run["seconds"] for run in own])
    return [KINDS[kind], str(len(own)), str(len(well)), number(seconds.median), spread(seconds)]
