"""Types of options that accept any text, and suggest values where the user presses Tab."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


class Suggested(click.types.StringParamType):
    """The type of an option for which a shell suggests names; others are accepted too."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with `incomplete`."""
        return [CompletionItem(name) for name in self._names if name.startswith(incomplete)]


class SuggestedList(Suggested):
    """The type of an option with commas, for which a shell suggests the names not yet given."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return `incomplete` with its last part completed."""
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [
            CompletionItem(before + comma + name)
            for name in self._names
            if name.startswith(last) and name not in given
        ]
