"""Files that a command is to write."""

from __future__ import annotations

from pathlib import Path

from evenstep.errors import InputError


def check_file(option: str, name: str | None) -> None:
    """Refuse, before hours of work, a file that can't be written after them.

    Raises:
        InputError: it is a folder, or in none.
    """
    if name in (None, "-"):
        return
    path = Path(name)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"got {option} {name}: a file in a folder that is there is needed")
