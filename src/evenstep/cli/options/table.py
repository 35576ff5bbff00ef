"""Declares command-line options as dataclass fields and derives everything else from them.

class Layout(OptionTable):
devices: str = option("auto", "Devices to train on.")

@click.command()
@takes_options(layout=Layout)
def train(layout: Layout) -> None: ...
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

OTHER_OPTIONS = "Options"
"""The heading of options without a group, such as --help."""


_MOST_INTEGER = 2**63 - 1


class Scope(enum.Enum):
    """What an option affects, and where its value is kept for `--resume`."""

    RUN_FILE = "part of the experiment; kept in run.json"
    CHECKPOINT = "part of the experiment; kept by the trainer in every checkpoint"
    REPLACEABLE = "kept in run.json; a resumed training may use a different value"
    LAYOUT = "does not affect the result; not kept"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command.

    Attributes:
        name: the name of its field.
        hint: the type of its field.
        flag: the option as it is written on the command line.
        scope: what it affects.
        group: the heading that it stands under in the help.
        argument: the argument of `evenstep.Trainer` that it sets; None if it sets none.
        settings: arguments of `click.option`.
    """

    name: str
    hint: Any
    flag: str
    scope: Scope
    group: str
    argument: str | None
    settings: dict[str, Any]

    @property
    def json_types(self) -> tuple[type, ...]:
        """The types that the option's value may have in a JSON file."""
        if typing.get_origin(self.hint) is Literal:
            return (str,)
        return (float, int) if self.hint is float else typing.get_args(self.hint) or (self.hint,)

    def accepts(self, value: Any) -> bool:
        """Whether the option may have a value that was read from a JSON file."""
        if type(value) not in self.json_types:
            return False
        try:
            kind = self.settings.get("type")
            return value is None or kind is None or kind.convert(value, None, None) == value
        except (click.BadParameter, OverflowError):
            return False


def option(default: Any, description: str, kind: Any = None, **settings: Any) -> Any:
    """Declare an option as a field of an `OptionTable`.

    Args:
        default: its default value.
        description: its help text.
        kind: a type of click. By default it follows from the field's type: `bool` is a flag,
            `Literal` a choice, `Path` a path, and `int` a number of at least 1.
        settings: `group` (the heading in the help), `scope` (by default, the layout), `flag` (by
            default, the field's name with dashes), `argument` (by default, the field's name if
            checkpoints keep the option, or else none), and further arguments of `click.option`.
    """
    return dataclasses.field(
        default=default, metadata={**settings, "help": description, "type": kind}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionTable:
    """Base class of tables of options; an instance holds the values for one command.

    Attributes:
        given: names of the options that were on the command line.
    """

    given: frozenset[str] = frozenset()

    @classmethod
    def options(cls) -> list[Option]:
        """Return the options in the order of their declaration."""
        hints = typing.get_type_hints(cls)
        return [_option(field, hints[field.name]) for field in dataclasses.fields(cls)[1:]]

    def trainer_arguments(self, *, given_only: bool = False) -> dict[str, Any]:
        """Return the arguments of `Trainer` that the options set.

        With `given_only`, options that were not on the command line are left out.
        """
        return {
            option.argument: getattr(self, option.name)
            for option in self.options()
            if option.argument and (option.name in self.given or not given_only)
        }


class GroupedOption(click.Option):
    """An option that the help of a `GroupedCommand` shows under the heading `group`."""

    def __init__(self, *arguments: Any, group: str = OTHER_OPTIONS, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        """Return the option and its help, without the limit of numbers that have none."""
        record = super().get_help_record(context)
        return record and (record[0], record[1].replace(f"<={_MOST_INTEGER}", ""))


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings, and ends with an example.

    Attributes:
        example: a command line.
        prints: a line of what it prints, where ... stands for anything.
    """

    def __init__(self, *arguments: Any, example: str, prints: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.example = example
        self.prints = prints

    def options_by_heading(self, context: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return each option and its help, in the order of the first option of each heading."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record and record[1]:  # arguments are described in the command's text
                groups.setdefault(getattr(parameter, "group", OTHER_OPTIONS), []).append(record)
        return groups

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        for heading, records in self.options_by_heading(context).items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        with formatter.section("Example"):
            for line in (f"$ {self.example}", self.prints):
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def takes_options(**tables: type[OptionTable]) -> Callable[[Callable[..., Any]], Any]:
    """Add all options of `tables` to a command; each table becomes the argument of its name."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.pass_context
        @functools.wraps(command)
        def with_tables(context: click.Context, /, **values: Any) -> Any:
            default = ParameterSource.DEFAULT
            given = {name for name in values if context.get_parameter_source(name) != default}
            for argument, table in tables.items():
                fields = {option.name: values.pop(option.name) for option in table.options()}
                values[argument] = table(**fields, given=frozenset(given))
            return command(**values)

        made = with_tables
        for one in [one for table in tables.values() for one in table.options()][::-1]:
            add = click.option(
                one.flag, one.name, cls=GroupedOption, group=one.group, **one.settings
            )
            made = add(made)
        return made

    return decorate


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    settings = {"default": field.default, **field.metadata}
    flag = settings.pop("flag", f"--{field.name.replace('_', '-')}")
    scope = settings.pop("scope", Scope.LAYOUT)
    group = settings.pop("group", OTHER_OPTIONS)
    argument = settings.pop("argument", field.name if scope is Scope.CHECKPOINT else None)
    plain = next(iter(typing.get_args(hint)), hint)  # of `int | None`, int
    if hint is bool:
        settings["is_flag"] = True
    elif typing.get_origin(hint) is Literal:
        settings["type"] = click.Choice(typing.get_args(hint))
    elif settings["type"] is None:
        settings["type"] = {
            int: click.IntRange(min=1, max=_MOST_INTEGER),
            Path: click.Path(path_type=Path),
        }.get(plain)
    if isinstance(settings["type"], click.IntRange | click.FloatRange):
        settings.setdefault("metavar", "N" if isinstance(settings["type"], click.IntRange) else "X")
    settings["show_default"] = hint is not bool and field.default is not None
    return Option(
        name=field.name,
        hint=hint,
        flag=flag,
        scope=scope,
        group=group,
        argument=argument,
        settings=settings,
    )
