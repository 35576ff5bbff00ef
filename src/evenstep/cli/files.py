"""The files that commands write: checked before hours of work, written completely or not at all."""

from __future__ import annotations

from pathlib import Path

import click

from evenstep.errors import InputError, shown
from evenstep.files import write_file

_LONG = 255


class OutputFile(click.types.StringParamType):
    """The type of an option that names a file to write, or - for stdout.

    With `may_be_stream`, a pipe or a device such as /dev/stdout is accepted too.
    """

    name = "file"

    def __init__(self, *, may_be_stream: bool = False) -> None:
        self._may_be_stream = may_be_stream

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the file's name. Raises InputError if it could not be written."""
        if value != "-":
            try:
                is_possible = self._is_possible(Path(value))
            except OSError:  # a name that is too long
                is_possible = False
            if not is_possible:
                flag = param.opts[0] if param else "file"
                what = shown(value) if len(value) > _LONG else value
                raise InputError(f"got {flag} {what}: expected a file in an existing folder")
        return value

    def _is_possible(self, path: Path) -> bool:
        is_stream = self._may_be_stream and _is_stream(path)
        is_file = path.is_file() or not path.exists() or is_stream
        return is_file and path.absolute().parent.is_dir()


def target_of(name: str) -> Path:
    """Return the file to write for `name`: if it is a symbolic link, the file it points to."""
    path = Path(name)
    return path.resolve() if path.is_symlink() else path


def write_text(name: str, text: str) -> None:
    """Write a file completely or not at all; write to a pipe or a device directly."""
    if _is_stream(Path(name)):
        Path(name).write_text(text, encoding="utf-8")
    else:
        write_file(target_of(name), text)


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
