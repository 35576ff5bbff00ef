"""The reference page of the command line, from what each command says with `--help`."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from evenstep.cli.options.table import OTHER_OPTIONS, GroupedCommand

WIDE: Any = {"terminal_width": 96, "max_content_width": 96}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OPENING = (
    "What each command says with `--help`, with an example: a command line, and a line of what it "
    "prints (`...` stands for anything). The examples continue each other, in one folder."
)


def command_page(main: click.Group, groups: Mapping[str, Sequence[click.Command]]) -> str:
    """Return the page of a program and its commands, under the headings of its help."""
    context = click.Context(main, info_name="evenstep", **WIDE)
    parts = ["# The command line", OPENING, *contents(groups)]
    for heading, commands in groups.items():
        parts.append(f"## {heading}")
        for command in commands:
            parts += section(command, of(command, context), 3)
    parts += ["## The program itself", usage(main, context), *options(main, context)]
    return "\n\n".join(parts)


def contents(groups: Mapping[str, Sequence[click.Command]]) -> Iterator[str]:
    """Yield a list of links to the commands for each heading."""
    for heading, commands in groups.items():
        rows = [
            f"* [`{one.name}`](#evenstep-{one.name}): {in_markdown(one.get_short_help_str(90))}"
            for one in commands
        ]
        yield f"**{heading}**"
        yield "\n".join(rows)


def section(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    """Yield the parts of the section of a command, and those of the commands in it."""
    yield f"{'#' * level} {context.command_path}"
    yield usage(command, context)
    yield in_markdown(inspect.cleandoc(command.help or ""))
    if isinstance(command, GroupedCommand):
        yield f"```bash\n{command.example}\n```"
        yield f"prints `{' '.join(command.prints.split())}`"
    yield from options(command, context)
    for inside in getattr(command, "commands", {}).values():
        yield from section(inside, of(inside, context), level + 1)


def of(command: click.Command, parent: click.Context) -> click.Context:
    """Return the context of a command in another one."""
    return click.Context(command, info_name=command.name, parent=parent, **WIDE)


def usage(command: click.Command, context: click.Context) -> str:
    """Return how a command is called."""
    return f"```text\n{command.get_usage(context)}\n```"


def options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the options of a command as lists, under their headings; --help alone is left out."""
    if isinstance(command, GroupedCommand):
        groups = command.options_by_heading(context)
    else:
        records = [one.get_help_record(context) for one in command.get_params(context)]
        groups = {OTHER_OPTIONS: [record for record in records if record]}
    for heading, records in groups.items():
        shown = [record for record in records if "--help" not in record[0].split()]
        if shown:
            yield f"**{heading}**"
            yield "\n\n".join(f"`{name}`\n:   {in_markdown(text)}" for name, text in shown)


def in_markdown(text: str) -> str:
    """Return plain text as Markdown that shows it as it is, and marks options as code."""
    parts = text.split("`")
    parts[::2] = map(marked, parts[::2])
    return "`".join(parts)


def marked(text: str) -> str:
    """Return plain text without code as Markdown."""
    shown = html.escape(text, quote=False).replace("*", r"\*").replace("[", r"\[")
    return FLAG.sub(r"`\g<0>`{.flag}", shown)
