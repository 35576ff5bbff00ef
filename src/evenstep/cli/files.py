"""Files that a command is to write."""

from __future__ import annotations

from pathlib import Path

from evenstep.errors import InputError
from evenstep.files import write_file


def check_file(option: str, name: str | None, *, may_be_stream: bool = False) -> None:
    """Refuse, before hours of work, a file that can't be written after them.

    Args:
        option: that names the file.
        name: the file; None or "-" for none.
        may_be_stream: whether a pipe or a device, such as /dev/stdout, will do.

    Raises:
        InputError: it is a folder, in none, or no regular file.
    """
    if name in (None, "-"):
        return
    path = Path(name)
    is_file = path.is_file() or not path.exists() or (may_be_stream and _is_stream(path))
    if not is_file or not path.absolute().parent.is_dir():
        raise InputError(f"got {option} {name}: a file in a folder that is there is needed")


def target_of(name: str) -> Path:
    """Return the file to write for `name`: where it is a link, the one that it leads to."""
    path = Path(name)
    return path.resolve() if path.is_symlink() else path


def write_text(name: str, text: str) -> None:
    """Write a file, whole or not at all; into a pipe or a device, the text as it is."""
    if _is_stream(Path(name)):
        Path(name).write_text(text, encoding="utf-8")
    else:
        write_file(target_of(name), text)


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
