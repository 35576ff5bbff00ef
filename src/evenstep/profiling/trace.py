"""Records what ran where and when, and saves it as a file that Perfetto and chrome://tracing open.

The format is Chrome's "Trace Event Format": complete events (`ph: X`) with times in microseconds,
and one row for each lane.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from evenstep.errors import SaveError
from evenstep.files import write_file


class Span(NamedTuple):
    """One bar of the trace.

    Attributes:
        row: number of the lane, or the name of a further row.
        name: text of the bar.
        category: what its time counts as.
        began_s, ended_s: times of `time.perf_counter`.
        story: further facts; None for none.
    """

    row: int | str
    name: str
    category: str
    began_s: float
    ended_s: float
    story: Mapping[str, object] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """What spans have in common that differ in their times and in some integers.

    Attributes:
        row: the name of their row; None for a lane, which is one of the integers.
        name: the parts of the text of the bar, between which integers stand.
        category: as of a span.
        keys: the names of the facts, each of which is an integer, or true or false.
        flags: those of the keys whose facts are true or false.
    """

    row: str | None
    name: tuple[str, ...]
    category: str
    keys: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()

    def span(self, lane: int, began_s: float, ended_s: float, values: Sequence[int]) -> Span:
        """Return the span with these integers: those in its name first, then its facts."""
        count = len(self.name) - 1
        texts = (*map(str, values[:count]), "")
        name = "".join(itertools.chain.from_iterable(zip(self.name, texts, strict=True)))
        facts = zip(self.keys, values[count:], strict=False)
        story = {key: bool(value) if key in self.flags else value for key, value in facts}
        row = lane if self.row is None else self.row
        return Span(row, name, self.category, began_s, ended_s, story or None)


Numbers: TypeAlias = tuple[Kind, int, float, float, Sequence[int]]
"""A span that consists of numbers: its kind, and the arguments of `Kind.span`."""

_VALUES = 6  # integers beside kind and lane
_WIDTH = 2 + _VALUES
_BLOCK = 1024  # spans
_MOST_OTHERS = 1000  # spans that are kept as objects
_MOST_KINDS = 200
_MOST = 2**31
_NUMBERS = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")
_OTHER = Kind("", (), "")


class _Block(NamedTuple):
    """Some spans: two times of each, and its integers."""

    times_s: array[float]
    numbers: array[int]

    def copy(self) -> _Block:
        return _Block(self.times_s[:], self.numbers[:])


class Trace:
    """The newest spans of an engine. Spans may be added and read from any thread.

    A span takes 48 bytes: its times, and integers for the rest. One that holds something else is
    kept as an object; there may be 1,000 of those.

    Args:
        rows: names of the lanes.
        limit: the largest number of spans that are kept.

    Attributes:
        rows: names of the lanes.
        facts: what a reader should know besides; saved in the file's `otherData`.
        dropped: number of older spans that were dropped to stay below the limit.
    """

    def __init__(self, rows: Sequence[str], *, limit: int = 85_000) -> None:
        self.rows = tuple(rows)
        self.facts: dict[str, object] = {}
        self.dropped = 0
        self._limit = limit
        self._count = 0
        self._kinds = {_OTHER: 0}
        self._found: dict[tuple[Any, ...], Kind] = {}  # of spans that were added as objects
        self._blocks: deque[_Block] = deque()
        self._gone = 0  # spans of the first block that were dropped
        self._others: deque[Span] = deque()
        self._lock = threading.RLock()  # the collector's destructors may read the trace

    def add(self, span: Span) -> object:
        """Record a span; return the older ones that are dropped, to be freed by the caller."""
        parts, lane, values = _parts_of(span)
        with self._lock:
            kind = self._found.get(parts, _OTHER)
            if kind is _OTHER and parts and len(self._found) < _MOST_KINDS:
                kind = self._found[parts] = Kind(*parts)
            if kind is _OTHER:
                self._others.append(span)
                lane, values = 0, ()
            return self.add_many([(kind, lane, span.began_s, span.ended_s, values)])

    def add_many(self, spans: Iterable[Numbers]) -> object:
        """Record spans that consist of numbers; return what `add` does."""
        times_s, numbers, kinds = list[float](), list[int](), self._kinds
        with self._lock:
            for kind, lane, began_s, ended_s, values in spans:
                number = kinds.get(kind)
                if number is None:
                    number = kinds[kind] = len(kinds)
                times_s += began_s, ended_s
                numbers += (number, lane, *values, *_ZEROS[len(values)])
            if not self._blocks or len(self._blocks[-1].times_s) >= 2 * _BLOCK:
                self._blocks.append(_Block(array("d"), array("i")))
            self._blocks[-1].times_s.extend(times_s)
            self._blocks[-1].numbers.extend(numbers)
            self._count += len(times_s) // 2
            return self._drop()

    def _drop(self) -> list[Span]:
        dropped: list[Span] = []  # a span's story may hold anything, with a destructor
        while self._count > self._limit or len(self._others) > _MOST_OTHERS:
            numbers = self._blocks[0].numbers
            if numbers[self._gone * _WIDTH] == 0:
                dropped.append(self._others.popleft())
            self._gone += 1
            self._count -= 1
            self.dropped += 1
            if self._gone * _WIDTH == len(numbers):
                self._blocks.popleft()
                self._gone = 0
        return dropped

    @property
    def spans(self) -> list[Span]:
        """The spans that were kept, in the order in which they were added."""
        with self._lock:  # else one span too many may be seen while another thread adds one
            blocks, gone = [block.copy() for block in self._blocks], self._gone
            kinds, others = [*self._kinds], iter([*self._others])
        found: list[Span] = []
        for times_s, numbers in blocks:
            for place in range(gone, len(times_s) // 2):
                kind, lane, *values = numbers[place * _WIDTH : (place + 1) * _WIDTH]
                began_s, ended_s = times_s[2 * place : 2 * place + 2]
                times = began_s, ended_s
                found.append(kinds[kind].span(lane, *times, values) if kind else next(others))
            gone = 0
        return found

    def save(self, file: str | Path) -> None:
        """Write the trace as JSON, for https://ui.perfetto.dev or chrome://tracing.

        Raises:
            SaveError: the file can't be written; an existing file is left unchanged.
        """
        path = Path(file)
        try:
            write_file(path, json.dumps(self.to_json(), default=str) + "\n")
        except OSError as error:
            raise SaveError(
                f"the trace could not be written to {path}: {error.strerror or error}"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the trace as a JSON object; times count from its first span."""
        spans = self.spans
        origin = min((span.began_s for span in spans), default=0.0)
        names = [*self.rows, *dict.fromkeys(s.row for s in spans if isinstance(s.row, str))]
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": kind, "pid": 1, "tid": number, "args": arguments}
            for number, name in enumerate(names)
            for kind, arguments in (
                ("thread_name", {"name": name}),
                ("thread_sort_index", {"sort_index": number}),
            )
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": 1,
                "tid": span.row if isinstance(span.row, int) else names.index(span.row),
                "ts": round((span.began_s - origin) * 1e6, 3),
                "dur": round((span.ended_s - span.began_s) * 1e6, 3),
                "args": dict(span.story or {}),
            }
            for span in spans
        ]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {**self.facts, "program": "evenstep", "dropped_spans": self.dropped},
        }


_ZEROS = [(0,) * (_VALUES - count) for count in range(_VALUES + 1)]


def _parts_of(span: Span) -> tuple[tuple[Any, ...], int, Sequence[int]]:
    """Return the parts of a span's kind, its lane, and its integers; no parts if it holds more."""
    pieces = _NUMBERS.split(span.name)
    story = span.story or {}
    values: list[Any] = [*map(int, pieces[1::2]), *story.values()]
    if len(values) > _VALUES or not all(map(_is_small, values)):
        return (), 0, ()
    flags = frozenset(key for key, value in story.items() if isinstance(value, bool))
    row, lane = (None, span.row) if isinstance(span.row, int) else (span.row, 0)
    return (row, tuple(pieces[::2]), span.category, tuple(story), flags), lane, values


def _is_small(value: object) -> bool:
    return type(value) in (int, bool) and -_MOST <= value < _MOST  # type: ignore[operator]
