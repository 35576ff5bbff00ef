"""`evenstep explain`: where the time of a traced training went, and what would help."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.text import Text

from evenstep.cli.advice import Finding, findings
from evenstep.cli.display import print_line
from evenstep.cli.shares import print_shares
from evenstep.cli.trace_reader import TraceAccount, read_trace


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def explain(file: str, as_json: bool) -> None:
    """Say where the time of a training went, and what would help.

    FILE is what `evenstep train --trace FILE` wrote. https://ui.perfetto.dev shows it as a picture.
    """
    account = read_trace(file)
    found = findings(account)
    if as_json:
        click.echo(_to_json(account, found))
    else:
        _print(Console(), account, found)


def _print(console: Console, account: TraceAccount, found: list[Finding]) -> None:
    print_line(console, _head(account))
    if account.dropped:
        print_line(console, f"{account.dropped:,} older spans had no room in the trace")
    print_line(console, "")
    print_shares(console, account.devices)
    for finding in found:
        print_line(console, "")
        # A terminal breaks lines between words; a pipe gets a line for each finding.
        console.print(Text(finding.text), soft_wrap=not console.is_terminal)


def _head(account: TraceAccount) -> str:
    steps = f"{account.steps:,} step{'s' * (account.steps != 1)}"
    each = f"{account.wall_s / account.steps * 1e3:,.1f} ms each"
    between = ""
    if account.between_s >= 0.01 * account.wall_s:
        between = f"; {account.between_s:,.2f} s between them are not counted"
    return f"{steps} in {account.wall_s:,.2f} s, {each}{between}"


def _to_json(account: TraceAccount, found: list[Finding]) -> str:
    whole = {
        **dataclasses.asdict(account),
        "findings": [dataclasses.asdict(finding) for finding in found],
    }
    return json.dumps(whole, allow_nan=False)
