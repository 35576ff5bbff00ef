"""Reads the JSON of a trace event by event, so that a file of any size takes little memory."""

from __future__ import annotations

import codecs
import errno
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

EVENTS = "traceEvents"  # the key of the list whose values are read one by one

_MOST_NBYTES = 1 << 27  # a full trace has a fifth of it
_MOST_LETTERS = 1 << 16  # of one event, and of each value beside the events
_BLOCK_NBYTES = 1 << 20
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


class TraceText:
    """The JSON object in a file that `Trace.save` wrote, of which a part at a time is in memory.

    Args:
        file: an open file, pipe or device.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read_nbytes = 0
        self._text, self._at = "", 0  # what was read last, and the place of the next letter

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield the object's keys with their values; of the list of events, each by itself.

        Raises:
            ValueError: it is not a JSON object, or one value is too long.
            OSError: the file can't be read, or is too long.
        """
        for key in self._list("{", "}"):
            self._take(":")
            if key == EVENTS and self._next() == "[":
                yield from ((EVENTS, event) for event in self._list("[", "]"))
            else:
                yield key, self._value()
        if self._next():
            raise ValueError("no JSON (more than one value)")

    def _list(self, begin: str, end: str) -> Iterator[Any]:
        """Yield what commas separate. Of an object these are keys: the caller takes the values."""
        self._take(begin)
        if self._next() != end:
            yield self._value()
        while self._next() == ",":
            self._take(",")
            yield self._value()
        self._take(end)

    def _take(self, letter: str) -> None:
        if self._next() != letter:
            raise ValueError(f"no JSON object ({self._next()!r} where {letter!r} is needed)")
        self._at += 1

    def _next(self) -> str:
        """Return the next letter behind spaces; nothing at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        self._next()
        if len(self._text) - self._at <= _MOST_LETTERS:
            self._read()
        try:
            value, end = _DECODER.raw_decode(self._text, self._at)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JSON ({error})") from None
        if end - self._at > _MOST_LETTERS:
            raise ValueError(f"a value of more than {_MOST_LETTERS:,} letters")
        self._at = end
        return value

    def _read(self) -> bool:
        """Read the next block; return whether there was one."""
        block = self._file.read(_BLOCK_NBYTES)
        self._read_nbytes += len(block)
        if self._read_nbytes > _MOST_NBYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MOST_NBYTES:,} bytes")
        try:
            text = self._decoder.decode(block, final=not block)
        except ValueError as error:
            raise ValueError(f"no JSON ({error})") from None
        self._text = self._text[self._at :] + text
        self._at = 0
        return bool(block)
