"""The page on recovery after killed processes, and on the cost of saving."""

from __future__ import annotations

from typing import Any

from evenstep.bench.rounds import summarise
from pages.common import joined, origin
from text import NOTHING, number, spread, table

KINDS = {
    "worker": "any process, after a random step was saved",
    "writer": "the process that saves, in the middle of a checkpoint",
}
HEAD = """# Reliability

`python benchmarks/write_docs.py` generates this page from files in `benchmarks/results`; don't edit
it."""


def page(*sections: str) -> str:
    """Return the page."""
    return joined(HEAD, *sections) + "\n"


def killed(document: dict[str, Any]) -> str:
    """Return the section on killed processes."""
    settings = document["settings"]
    text = (
        f"`evenstep train --processes {settings['processes']} --max-restarts 3` for "
        f"{settings['steps']} steps, with a checkpoint every {settings['checkpoint_every']}. One "
        f"process is killed (SIGKILL). The launcher restarts both, and they resume from the newest "
        f"checkpoint. A run has recovered if it ends by itself, leaves no process behind, and has "
        f"the fingerprint of an undisturbed run in one process."
    )
    head = ("killed", "runs", "recovered", "seconds from start to end", "spread")
    rows = [_row(document["runs"], kind) for kind in KINDS]
    return joined("## Killed processes", origin(document), text, table(head, rows))


def saved(document: dict[str, Any]) -> str:
    """Return the section on what saving costs."""
    settings = document["settings"]
    text = (
        f"ResNet-18, batch {settings['batch']}, momentum, two devices; a checkpoint after every "
        f"{settings['every']} of {settings['steps']} steps. `save(folder)` hashes, writes and "
        f"flushes before it returns. With `aside=True` it only copies the state; a worker thread "
        f"does the rest, so training does not wait for the disk. That thread competes with the CPU "
        f"devices for the cores: the last column includes this, and the end of the last write."
    )
    head = ("training", "ms until `save` returns", "spread", "ms per step, including saves")
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
