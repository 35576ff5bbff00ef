"""Atomic writes (a file gets its whole content, or keeps the old one), and reads with a limit."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeAlias

Content: TypeAlias = "bytes | str | Callable[[BinaryIO], object]"
"""Bytes, text (written as UTF-8), or a function that writes to the open file."""

# Some network disks can't flush a folder, and need not; one that may not be read can't be opened.
_FOLDERS_MAY = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_BLOCK_NBYTES = 1 << 20


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
            if mode is not None and hasattr(os, "fchmod"):  # before Python 3.13, not on Windows
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


def read_file(path: str | os.PathLike[str], *, at_most: int | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        path: the file.
        at_most: the largest number of bytes that is read; None for any.

    Raises:
        OSError: it can't be read, is not a regular file, or has more bytes than `at_most`, which
            were not read.
    """
    with open_file(path) as file:
        is_too_long = at_most is not None and os.fstat(file.fileno()).st_size > at_most
        content = b"" if is_too_long else file.read()
    if at_most is not None and (is_too_long or len(content) > at_most):
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", str(path))
    return content


def open_file(path: str | os.PathLike[str], *, may_be_stream: bool = False) -> BinaryIO:
    """Open a file for reading.

    Args:
        path: the file.
        may_be_stream: whether a pipe or a device is opened too. Otherwise it is refused at once,
            where opening it might wait without end.

    Raises:
        OSError: it can't be read, or is not a regular file.
    """
    flags = 0 if may_be_stream else getattr(os, "O_NONBLOCK", 0)  # a pipe opens without a writer
    file = open(path, "rb", opener=lambda name, given: os.open(name, given | flags))  # noqa: SIM115
    if not may_be_stream and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 (hexadecimal) of a file, as the command `sha256sum` prints it."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(_BLOCK_NBYTES):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    mode = os.O_RDWR if sys.platform == "win32" else os.O_RDONLY  # Windows flushes no file to read
    try:
        descriptor = os.open(path, mode)
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
