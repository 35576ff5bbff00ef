"""`evenstep doctor`: what is missing, what would change results or slow trainings down."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from evenstep.cli.machine.checks import MachineFacts, feature_states, findings
from evenstep.cli.machine.facts import read_facts
from evenstep.cli.terminal.output import print_line
from evenstep.private_torch.names import TESTED_TORCH

_HEADINGS = {"results": "Would change results", "speed": "Would slow training down"}


def doctor(environment: Mapping[str, str], *, as_json: bool) -> None:
    """Print the findings about this machine."""
    facts = read_facts(environment)
    if as_json:
        click.echo(json.dumps(_as_json(facts)))
        return
    console = Console()
    for line in report(facts):
        # A terminal breaks lines between words; on a pipe each line is one line.
        console.print(line, soft_wrap=not console.is_terminal, highlight=False)
    print_line(console, "")
    print_line(console, "evenstep devices shows the devices, and what results depend on")


def report(facts: MachineFacts) -> Iterator[Text]:
    """Yield the lines of the report."""
    version = "from its sources" if facts.evenstep is None else facts.evenstep
    python = f"Python {platform.python_version()}"
    yield Text(f"evenstep {version}, torch {facts.torch}, {python}, {facts.system}")
    yield Text(f"tested with torch {', '.join(TESTED_TORCH)}")
    yield from _features(facts)
    found = findings(facts)
    for kind, heading in _HEADINGS.items():
        yield Text("")
        yield Text(heading, "bold")
        some = [finding for finding in found if finding.kind == kind]
        for finding in some:
            yield Text(f"  {finding.text}")
            yield Text(f"    fix: {finding.fix}", "green")
        if not some:
            yield Text("  nothing found")


def _features(facts: MachineFacts) -> Iterator[Text]:
    yield Text("")
    yield Text("Features", "bold")
    for state in feature_states(facts):
        *others, last = state.missing or ("",)
        missing = f"{', '.join(others)} and {last}" if others else last
        yield Text(f"  {state.name}: {f'needs {missing}' if missing else 'ready'}")
        if missing:
            yield Text(f"    fix: {state.fix}", "green")


def _as_json(facts: MachineFacts) -> dict[str, Any]:
    known = {**dataclasses.asdict(facts), "python": platform.python_version()}
    del known["environment"]  # it may hold secrets
    return {
        "facts": known,
        "tested_torch": TESTED_TORCH,
        "features": list(map(dataclasses.asdict, feature_states(facts))),
        "findings": list(map(dataclasses.asdict, findings(facts))),
    }
