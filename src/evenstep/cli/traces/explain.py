"""`evenstep explain`: says where the time of a traced training went, and what would help."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from evenstep.bench.results import write_text
from evenstep.cli.options.training import spell_options
from evenstep.cli.terminal.output import print_line, print_table, shares_table
from evenstep.cli.traces.advice import Finding, findings
from evenstep.cli.traces.timeline import timeline_page
from evenstep.profiling.reader import TraceAccount, read_trace


def explain(file: str, *, as_json: bool, page: Path | None = None) -> None:
    """Print where the time of the trace in `file` went; draw its last steps into `page`."""
    account, events = read_trace(file)
    found = [
        dataclasses.replace(finding, text=spell_options(finding.text))
        for finding in findings(account)
    ]
    if page is not None:
        write_text(page, timeline_page(account, events, [finding.text for finding in found]))
    if as_json:
        whole = {**dataclasses.asdict(account), "findings": list(map(dataclasses.asdict, found))}
        click.echo(json.dumps(whole, allow_nan=False))
    else:
        _print(Console(), account, found)


def _print(console: Console, account: TraceAccount, found: list[Finding]) -> None:
    print_line(console, _summary(account))
    if account.dropped:
        print_line(console, f"{account.dropped:,} older spans did not fit into the trace")
    print_line(console, "")
    print_table(console, shares_table(account.devices))
    for finding in found:
        print_line(console, "")
        # A terminal breaks lines between words; on a pipe each finding is one line.
        console.print(Text(finding.text), soft_wrap=not console.is_terminal)


def _summary(account: TraceAccount) -> str:
    steps = f"{account.steps:,} step{'s' * (account.steps != 1)}"
    each = f"{account.wall_s / account.steps * 1e3:,.1f} ms each"
    between = ""
    if account.between_s >= 0.01 * account.wall_s:
        between = f"; {account.between_s:,.2f} s between them are not counted"
    return f"{steps} in {account.wall_s:,.2f} s, {each}{between}"
