"""The files that commands write: checked before hours of work, written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import click
from click.shell_completion import CompletionItem

from evenstep.errors import InputError, shown
from evenstep.files import write_file

_DESCRIPTOR = re.compile(r"(/dev|/proc/self)/fd/(?P<number>\d+)")
_STDOUT, _STDERR = 1, 2
_MOST_LINKS = 40  # as the kernel follows
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
                fits = self._fits(value)
            except OSError:  # a name that is too long
                fits = False
            if not fits:
                flag = param.opts[0] if param else "file"
                what = shown(value) if len(value) > _LONG else value
                raise InputError(f"got {flag} {what}: expected a file in an existing folder")
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete the name of a file."""
        return [CompletionItem(incomplete, type="file")]

    def _fits(self, name: str) -> bool:
        if _descriptor_of(name) is not None or _is_stream(Path(name)):
            return self._may_be_stream
        target = target_of(name).absolute()
        return target.parent.is_dir() and not target.is_dir() and not target.is_symlink()


class OutputFolder(click.ParamType[Path]):
    """The type of an option that names a folder to write into, which may not exist yet."""

    name = "folder"

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the folder. Raises InputError if it can't be one."""
        path = Path(value)
        try:
            nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
            fits = bool(str(value).encode().strip()) and nearest.is_dir()
        except (OSError, ValueError):  # too long, or no UTF-8
            fits = False
        if not fits:
            flag = param.opts[0] if param else "folder"
            raise InputError(
                f"got {flag} {shown(str(value))}: expected a folder, or a new one in a folder"
            )
        return path

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete the name of a folder."""
        return [CompletionItem(incomplete, type="dir")]


class FolderName(OutputFolder):
    """The type of an option that names a folder; whether it is one is found out when it is used."""

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the folder. Raises InputError if the name is empty."""
        return Path(value) if str(value).strip() else super().convert(value, param, ctx)


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Inside `with`, only what is written to the given file reaches stdout, all else stderr.

    Models print, and so do libraries: gloo does so in torch 2.8 and 2.9.
    """
    stdout = sys.__stdout__
    if stdout is None or sys.stdout is not stdout:  # it isn't the process's
        yield sys.stdout
        return
    stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with open(kept, "w", encoding="utf-8", closefd=False) as file:
            yield file
    finally:
        stdout.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)


def target_of(name: str) -> Path:
    """Return the file to write for `name`: if it is a symbolic link, the file it points to.

    Raises:
        InputError: it is a link of another user, who may have put it into a shared folder so that
            another file is written.
    """
    path = Path(name)
    for path in _links(name):
        # On Windows, where links need rights of their own, all files belong to user 0.
        if path.is_symlink() and os.lstat(path).st_uid and os.lstat(path).st_uid != os.geteuid():
            raise InputError(
                f"{path} is a link that another user has made: give the path of the file itself"
            )
    return path


def write_text(name: str, text: str) -> None:
    """Write a file completely or not at all; write to a pipe or a device directly.

    What is already open, such as /dev/stdout, is written to where it stands, even if it is a file.
    """
    descriptor = _descriptor_of(name)
    if descriptor is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        descriptor = os.dup(descriptor)
    elif _is_stream(Path(name)):
        descriptor = os.open(name, os.O_WRONLY)
    if descriptor is None:
        write_file(target_of(name), text)
        return
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


def _links(name: str) -> Iterator[Path]:
    """Yield the path of a name, and of what each symbolic link leads to."""
    path = Path(name)
    yield path
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return
        path = path.parent / path.readlink()
        yield path


def _descriptor_of(name: str) -> int | None:
    """Return the number of the open file that a name such as /dev/stdout means."""
    for path in _links(name):
        if match := _DESCRIPTOR.fullmatch(os.path.abspath(path)):
            return int(match["number"])
    return None


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
