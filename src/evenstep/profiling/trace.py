"""What ran where and when: one row a lane, in the format that Perfetto and chrome://tracing open.

The format is Chrome's "Trace Event Format" (complete events, `ph: X`, times in microseconds).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.errors import SaveError


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        row: the lane's number, or the name of a row beside the lanes.
        name: what it was.
        category: what its seconds count as.
        began_s, ended_s: by `time.perf_counter`.
        story: more to say about it; None for nothing.
    """

    row: int | str
    name: str
    category: str
    began_s: float
    ended_s: float
    story: Mapping[str, object] | None


class Trace:
    """The newest spans of an engine.

    Attributes:
        rows: the name of each lane.
        dropped: how many older spans were left out to bound memory.
    """

    def __init__(self, rows: Sequence[str], *, limit: int = 200_000) -> None:
        self.rows = tuple(rows)
        self.dropped = 0
        self._limit = limit
        self._count = 0
        self._kept: deque[tuple[int, Callable[[], Sequence[Span]] | Span]] = deque()
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Keep a span; called from any thread."""
        self._keep(1, span)

    def add_later(self, count: int, make: Callable[[], Sequence[Span]]) -> None:
        """Keep `count` spans that are made when somebody looks; called from any thread."""
        self._keep(count, make)

    def _keep(self, count: int, what: Callable[[], Sequence[Span]] | Span) -> None:
        with self._lock:
            self._kept.append((count, what))
            self._count += count
            while self._count > self._limit:
                oldest, _ = self._kept.popleft()
                self._count -= oldest
                self.dropped += oldest

    @property
    def spans(self) -> list[Span]:
        """The spans that are kept, in the order in which they were added."""
        with self._lock:
            kept = [*self._kept]
        spans: list[Span] = []
        for _, what in kept:
            if isinstance(what, Span):
                spans.append(what)
            else:
                spans += what()
        return spans

    def save(self, file: str | Path) -> None:
        """Write the trace as JSON; https://ui.perfetto.dev and chrome://tracing open it.

        Raises:
            SaveError: the file can't be written; one that was there is as it was.
        """
        path = Path(file)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(self.to_json(), default=str) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise SaveError(
                f"the trace could not be written to {path}: {error.strerror or error}"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the trace as a JSON object; times count from its first span."""
        spans = self.spans
        origin = min((span.began_s for span in spans), default=0.0)
        others = dict.fromkeys(span.row for span in spans if isinstance(span.row, str))
        numbers: dict[int | str, int] = {number: number for number in range(len(self.rows))}
        numbers |= {name: len(self.rows) + place for place, name in enumerate(others)}
        names = [*self.rows, *others]
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": kind,
                "pid": 1,
                "tid": number,
                "args": {"name": name} if kind == "thread_name" else {"sort_index": number},
            }
            for number, name in enumerate(names)
            for kind in ("thread_name", "thread_sort_index")
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": 1,
                "tid": numbers[span.row],
                "ts": round((span.began_s - origin) * 1e6, 3),
                "dur": round((span.ended_s - span.began_s) * 1e6, 3),
                "args": dict(span.story or {}),
            }
            for span in spans
        ]
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"program": "evenstep", "dropped_spans": self.dropped},
        }
