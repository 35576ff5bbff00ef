"""The file of a recorded process: one JSON value a line, so that a killed run leaves what it had.

A record is a folder with a file for each process. The first line of a file is its header; each of
the others is an event, in the order in which things happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.errors import InputError

FORMAT, VERSION = "evenstep record", 2


class RecordFile:
    """Writes the events of one process.

    After `most_nbytes`, events are dropped, all but a line that says so. The folder is created if
    it doesn't exist.

    Attributes:
        is_full: whether events are dropped.

    Raises:
        InputError: the file can't be created.
    """

    def __init__(self, folder: Path, rank: int, most_nbytes: int) -> None:
        self.is_full = False
        self._left_nbytes = most_nbytes
        path = folder / f"process-{rank}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._file = path.open("xb", buffering=0)
            except FileExistsError:  # of another process that knows no number, either
                self._file = path.with_stem(f"{path.stem}-{os.getpid()}").open("xb", buffering=0)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"the record {folder} can't be written ({reason})") from error

    def write(self, event: Mapping[str, Any]) -> None:
        """Add an event; each is one write, so that no other process sees a part of it.

        What can't be written ends the record, and not the training: a line on stderr says why.
        """
        if self.is_full or self._file.closed:
            return
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._left_nbytes:
            self._put(json.dumps({"what": "full"}).encode() + b"\n")
            self._end("it has reached its largest size")
        else:
            self._put(line)

    def _put(self, line: bytes) -> None:
        self._left_nbytes -= len(line)
        try:
            if self._file.write(line) < len(line):
                self._end("there is no room for more")
        except OSError as error:
            self._end(error.strerror or str(error))

    def _end(self, reason: str) -> None:
        if not self.is_full:
            self.is_full = True
            print(f"evenstep: the record {self._file.name} ends here: {reason}", file=sys.stderr)

    def close(self) -> None:
        """Write no more."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
