"""Tables and lines on a terminal or a pipe. No line is ever wrapped or cut."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.profiling.accounting import DeviceShares, together, whole_percents

_UNLIMITED = 100_000  # columns


def say(line: str) -> None:
    """Print a line on stderr."""
    click.echo(line, err=True)


def command_line() -> str:
    """Return the command that is running, as a shell takes it."""
    return shlex.join(["evenstep", *sys.argv[1:]])


def print_line(console: Console, text: str | Text) -> None:
    """Print `text` as it is, without markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table at its full width, even if the console is narrower."""
    options = console.options.update(width=_UNLIMITED)
    for segments in console.render_lines(table, options, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        print_line(console, line)


def numbers_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with a label in the first column and numbers in the others."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if number else "left", vertical="bottom")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def fields_table(fields: Iterable[tuple[str, str]]) -> Table:
    """Return a table of labels and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for label, value in fields:
        table.add_row(Text(label), Text(value))
    return table


def shares_table(devices: Sequence[DeviceShares]) -> Table:
    """Return a table of where the time of each device went, and of all devices if several.

    The percentages in a row add up to 100, or are all 0 if no step was done.
    """
    heads = ["device", "busy", "waiting\nfor data", "waiting\nfor others", "summing", "updating"]
    whole = [together(devices)] if len(devices) > 1 else []
    rows = [
        (
            device.device,
            *(f"{percent}%" for percent in whole_percents(device.shares.values())),
            str(device.shards),
            str(device.stolen),
        )
        for device in [*devices, *whole]
    ]
    return numbers_table([*heads, "shards", "stolen"], rows)
