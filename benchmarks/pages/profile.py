"""The section on where a step's time goes: operators, by the way the batch is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pages.common import joined, note, origin
from text import NOTHING, table

LABELS = {"lenet": "LeNet", "resnet18": "ResNet-18"}
SHOWN = 12
_MOST_LETTERS = 60
_TEXT = """torch's profiler on one core, channels-last, one run each: milliseconds of a step that
each operator takes itself, median of the steps. `whole` is a plain loop over whole batches; `V = 2`
and `V = 8` accumulate over shards, once in a plain loop without evenstep, once in evenstep (one
device, inline lane); `hybridized` is evenstep with compiled shards, whose kernels have long names.
The last rows say what all operators take, what lies between them (Python, and the profiler's
own cost, which grows with the number of calls), and a step's time without the profiler. malloc
keeps freed memory in all of them."""


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    tables = [_network(document, network) for network in document["settings"]]
    return joined(
        "## Where a step's time goes",
        origin(document),
        _TEXT,
        *tables,
        note(notes, "step_profile"),
    )


def _network(document: dict[str, Any], network: str) -> str:
    runs = [run for run in document["runs"] if run["network"] == network]
    examples = document["settings"][network]["examples"]
    head = (f"{LABELS[network]}, {examples} examples", *(_way(run) for run in runs))
    rows = [[f"`{_short(name)}`", *(_cell(run, name) for run in runs)] for name in _largest(runs)]
    rows += [
        ["all operators", *(f"{run['all_operators_ms']:.1f}" for run in runs)],
        ["between", *(f"{run['profiled_step_ms'] - run['all_operators_ms']:.1f}" for run in runs)],
        ["step, not profiled", *(f"{run['step_ms']:.1f}" for run in runs)],
    ]
    return table(head, rows)


def _short(name: str) -> str:
    """Return the name of an operator, cut where a compiled one tells all that it has fused."""
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 3]}..."


def _way(run: Mapping[str, Any]) -> str:
    cut = f"V = {run['shards']}"
    names = {"shards": "plain", "evenstep": "evenstep", "hybridized": "hybridized"}
    return f"{names[run['way']]}, {cut}" if run["way"] in names else str(run["way"])


def _largest(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the operators that take most in any of the runs, largest first."""
    most: dict[str, float] = {}
    for run in runs:
        for name, milliseconds in run["operators_ms"].items():
            most[name] = max(most.get(name, 0.0), milliseconds)
    return sorted(most, key=lambda name: (-most[name], name))[:SHOWN]


def _cell(run: Mapping[str, Any], name: str) -> str:
    milliseconds = run["operators_ms"].get(name)
    return NOTHING if milliseconds is None else f"{milliseconds:.1f}"
