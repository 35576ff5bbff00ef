"""Atomic writes: a file gets its new content as a whole, or keeps the one that it had."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeAlias

Content: TypeAlias = "bytes | str | Callable[[BinaryIO], object]"
"""Bytes, text (written as UTF-8), or a function that writes to the open file."""

# Some network disks can't flush a folder, and need not; one that may not be read can't be opened.
_FOLDERS_MAY = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


def write_file(path: str | os.PathLike[str], content: Content) -> None:
    """Write `content` to a draft in the same folder, flush it to the disk, and rename it to `path`.

    After a crash at any moment, `path` holds the old content or the new. The draft is created
    exclusively, under a name that nobody can predict, so it never follows a planted link. The file
    gets the permissions that a plain `open` would give it: those of the file that it replaces, or
    those that the umask leaves.

    Raises:
        OSError: the file can't be written, or `path` is there and not a regular file (a folder, a
            link, a device). What was at `path` is unchanged, and the draft is removed.
    """
    path = Path(path)
    mode = _mode_of(path)
    draft = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.draft")
    file = draft.open("xb")
    try:
        with file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if path.is_file() or error.errno not in _FOLDERS_MAY:
            raise


def _mode_of(path: Path) -> int | None:
    """Return the permissions of the file at `path`; None if nothing is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise OSError(errno.EEXIST, f"it is {kind}: give the path of a file", str(path))
    return stat.S_IMODE(mode)
