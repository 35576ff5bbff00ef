"""Records what ran where and when, and saves it as a file that Perfetto and chrome://tracing open.

The format is Chrome's "Trace Event Format": complete events (`ph: X`) with times in microseconds,
and one row for each lane.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Trace:
    """The newest spans of an engine. Spans may be added and read from any thread.

    Args:
        rows: names of the lanes.
        limit: the largest number of spans that are kept.

    Attributes:
        rows: names of the lanes.
        facts: what a reader should know besides; saved in the file's `otherData`.
        dropped: number of older spans that were dropped to stay below the limit.
    """

    def __init__(self, rows: Sequence[str], *, limit: int = 200_000) -> None:
        self.rows = tuple(rows)
        self.facts: dict[str, object] = {}
        self.dropped = 0
        self._limit = limit
        self._count = 0
        self._kept: deque[tuple[int, Callable[[], Sequence[Span]] | Span]] = deque()
        self._lock = threading.RLock()  # the collector's destructors may read the trace

    def add(self, span: Span) -> object:
        """Record a span; return the older ones that are dropped, to be freed by the caller."""
        return self._keep(1, span)

    def add_later(self, count: int, make: Callable[[], Sequence[Span]]) -> None:
        """Record `count` spans that `make` returns when the trace is read."""
        self._keep(count, make)

    def _keep(self, count: int, entry: Callable[[], Sequence[Span]] | Span) -> object:
        dropped: list[object] = []  # a span's story may hold anything, with a destructor
        with self._lock:
            self._kept.append((count, entry))
            self._count += count
            while self._count > self._limit:
                oldest = self._kept.popleft()
                dropped.append(oldest)
                self._count -= oldest[0]
                self.dropped += oldest[0]
        return dropped

    @property
    def spans(self) -> list[Span]:
        """The spans that were kept, in the order in which they were added."""
        with self._lock:  # else one span too many may be seen while another thread adds one
            kept = self._kept.copy()
        return [
            span for _, entry in kept for span in ([entry] if isinstance(entry, Span) else entry())
        ]

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
