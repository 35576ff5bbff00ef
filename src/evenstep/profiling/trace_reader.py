"""Reads a trace that was saved: what the devices did in its steps, and what that came to."""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.errors import InputError
from evenstep.profiling.accounting import Account, DeviceShares

_NEEDED = "a file that `evenstep train --trace FILE` wrote is needed"
_WORK = ("compute", "sum", "update")
_NAMED_ROWS = ("steps", "front end")
_SAME_TIME_S = 1e-6  # times in a file are rounded

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceAccount:
    """What a trace says of its steps.

    Attributes:
        devices: where each device's time went.
        steps: how many were counted.
        wall_s: seconds of these steps, with the waiting for their data.
        wait_data_s: seconds of it in which no device could begin.
        between_s: seconds from the first step to the last that belong to none (testing, saving).
        updating_s: seconds of it in which any device was updating.
        shards: most shards that were computed in one step; 0 if the trace doesn't say.
        shard_s: by device, the median seconds of a shard; without the devices that had none.
        median_shard_s: of all shards; None if there are none.
        late_shard_s: one shard in twenty took longer than so many seconds; None likewise.
        loads: how many batches the front end loaded.
        load_s: seconds of that.
        longest_load_s: seconds of the longest.
        overlapped_load_s: seconds of `load_s` that passed while devices were at a step.
        copy_s: seconds of all copies to devices.
        dropped: how many older spans the trace had no room for.
    """

    devices: tuple[DeviceShares, ...]
    steps: int
    wall_s: float
    wait_data_s: float
    between_s: float
    updating_s: float
    shards: int
    shard_s: Mapping[str, float]
    median_shard_s: float | None
    late_shard_s: float | None
    loads: int
    load_s: float
    longest_load_s: float
    overlapped_load_s: float
    copy_s: float
    dropped: int


class _Event(NamedTuple):
    row: str
    category: str
    began_s: float
    ended_s: float
    story: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class _Step(NamedTuple):
    opened_s: float
    began_s: float
    ended_s: float


def read_trace(file: str | Path) -> TraceAccount:
    """Read what `Trace.save` wrote.

    Raises:
        InputError: the file can't be read, is damaged or of another program, or has no steps.
    """
    try:
        document = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{file} could not be read ({error.strerror or error}): {_NEEDED}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}): {_NEEDED}") from None
    try:
        return account_of_trace(document)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def account_of_trace(document: object) -> TraceAccount:
    """Add up the steps of a trace.

    Where older spans were dropped, only steps that are there as a whole are counted.

    Args:
        document: a JSON object as `Trace.to_json` returns it.

    Raises:
        InputError: it is something else, or it has no steps.
    """
    rows, events, dropped = _parse(document)
    devices = _devices(rows, events)
    steps = _steps(events, dropped)
    if not devices:
        raise InputError(f"got a trace with steps, but without a row of a device: {_NEEDED}")
    account = Account(devices)
    for step in steps:
        account.add_step(*step)
    working = _merged((step.began_s, step.ended_s) for step in steps)
    work = [
        event
        for event in events
        if event.row in devices
        and event.category in _WORK
        and _touches((event.began_s, event.ended_s), working)
    ]
    lanes = {device: lane for lane, device in enumerate(devices)}
    for event in work:
        account.add(
            lanes[event.row],
            event.category,
            event.seconds,
            shards=_is_shard(event),
            stolen=_is_shard(event) and event.story.get("stolen") is True,
        )
    shards = [event for event in work if _is_shard(event)]
    seconds = sorted(event.seconds for event in shards)
    since_s = steps[0].opened_s if dropped else -math.inf
    recent = [event for event in events if event.began_s >= since_s]
    loads = [e for e in recent if e.row == "front end" and e.category == "load"]
    return TraceAccount(
        devices=account.shares(),
        steps=account.steps,
        wall_s=account.wall_s,
        wait_data_s=account.wait_data_s,
        between_s=max(0.0, steps[-1].ended_s - steps[0].opened_s - account.wall_s),
        updating_s=_total(
            _merged((event.began_s, event.ended_s) for event in work if event.category == "update")
        ),
        shards=_most_shards(shards),
        shard_s=_medians(shards),
        median_shard_s=statistics.median(seconds) if seconds else None,
        late_shard_s=seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
        loads=len(loads),
        load_s=sum(load.seconds for load in loads),
        longest_load_s=max((load.seconds for load in loads), default=0.0),
        overlapped_load_s=sum(_overlap((load.began_s, load.ended_s), working) for load in loads),
        copy_s=sum(e.seconds for e in recent if e.category == "copy" and e.row not in devices),
        dropped=dropped,
    )


# ---- from JSON to events


def _parse(document: object) -> tuple[list[str], list[_Event], int]:
    """Return the names of the rows, the events, and how many older ones were dropped."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise InputError(f"got JSON without a list `traceEvents`: {_NEEDED}")
    names: dict[object, str] = {}
    spans: list[tuple[int, dict[str, Any]]] = []
    for number, event in enumerate(document["traceEvents"]):
        if not isinstance(event, dict):
            raise _damaged(number, f"is {event!r:.40}, not an object")
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            names[_row_key(number, event)] = _text(number, _story(number, event), "name")
        elif event.get("ph") == "X":
            spans.append((number, event))
    others = document.get("otherData")
    dropped = others.get("dropped_spans", 0) if isinstance(others, dict) else 0
    if type(dropped) is not int or dropped < 0:
        raise InputError(f"got dropped_spans = {dropped!r:.40}: a count is needed: {_NEEDED}")
    events = [_event(number, event, names) for number, event in spans]
    return list(dict.fromkeys(names.values())), events, dropped


def _event(number: int, event: Mapping[str, Any], names: Mapping[object, str]) -> _Event:
    row = names.get(_row_key(number, event), "")
    began_s = _number(number, event, "ts") * 1e-6
    took_s = _number(number, event, "dur") * 1e-6
    if took_s < 0:
        raise _damaged(number, f"has dur = {event['dur']}, less than nothing")
    category = event.get("cat")
    return _Event(
        row=row,
        category=category if isinstance(category, str) else "",
        began_s=began_s,
        ended_s=began_s + took_s,
        story=_story(number, event),
    )


def _row_key(number: int, event: Mapping[str, Any]) -> object:
    key = (event.get("pid"), event.get("tid"))
    if not all(part is None or isinstance(part, str | int) for part in key):
        raise _damaged(number, f"has pid and tid = {key!r:.40}")
    return key


def _story(number: int, event: Mapping[str, Any]) -> Mapping[str, Any]:
    story = event.get("args", {})
    if not isinstance(story, dict):
        raise _damaged(number, f"has args = {story!r:.40}, not an object")
    return story


def _text(number: int, values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise _damaged(number, f"has {key} = {value!r:.40}, not a text")
    return value


def _number(number: int, event: Mapping[str, Any], key: str) -> float:
    value: Any = event.get(key)
    if type(value) not in (int, float) or not abs(value) < 1e300:  # NaN neither
        raise _damaged(number, f"has {key} = {value!r:.40}, not a number")
    return float(value)


def _damaged(number: int, what: str) -> InputError:
    return InputError(f"event {number} {what}: {_NEEDED}, as it was written")


# ---- from events to steps and shards


def _devices(rows: Sequence[str], events: Iterable[_Event]) -> list[str]:
    """Return the rows of devices: those with a row for copies, or with work."""
    known = {row for row in rows if f"copy {row}" in rows}
    known |= {event.row for event in events if event.category in _WORK}
    known -= {*_NAMED_ROWS, *(f"copy {row}" for row in rows)}
    return [row for row in rows if row in known]


def _steps(events: Sequence[_Event], dropped: int) -> list[_Step]:
    """Return the steps that are whole, in the order of their ends."""
    waits = sorted(
        (event.ended_s, event.began_s)
        for event in events
        if event.row == "steps" and event.category == "wait"
    )
    steps = [
        _Step(_opened(event.began_s, waits), event.began_s, event.ended_s)
        for event in events
        if event.row == "steps" and event.category == "step"
    ]
    if not steps:
        raise InputError(f"got a trace without steps of a training: {_NEEDED}")
    if dropped:
        horizon_s = min(event.ended_s for event in events)
        steps = [step for step in steps if step.opened_s >= horizon_s]
        if not steps:
            raise InputError(
                f"got a trace without one whole step, because {dropped:,} older spans had no room: "
                f"fewer --shards leave room for more steps"
            )
    return sorted(steps, key=lambda step: step.ended_s)


def _opened(began_s: float, waits: Sequence[Interval]) -> float:
    """Return when the wait began that ended when a step began; `began_s` if there was none."""
    at = bisect.bisect_left(waits, (began_s - _SAME_TIME_S, -math.inf))
    if at < len(waits) and waits[at][0] <= began_s + _SAME_TIME_S:
        return waits[at][1]
    return began_s


def _is_shard(event: _Event) -> bool:
    return event.category == "compute" and "shard" in event.story


def _most_shards(shards: Iterable[_Event]) -> int:
    steps: dict[str, set[str]] = defaultdict(set)
    for event in shards:
        steps[str(event.story.get("step"))].add(str(event.story["shard"]))
    return max(map(len, steps.values()), default=0)


def _medians(shards: Iterable[_Event]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in shards:
        seconds[event.row].append(event.seconds)
    return {device: statistics.median(values) for device, values in seconds.items()}


# ---- intervals


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones, in order."""
    merged: list[Interval] = []
    for began_s, ended_s in sorted(intervals):
        if merged and began_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended_s))
        else:
            merged.append((began_s, ended_s))
    return merged


def _total(intervals: Iterable[Interval]) -> float:
    return sum(ended_s - began_s for began_s, ended_s in intervals)


def _touches(interval: Interval, intervals: Sequence[Interval]) -> bool:
    """Say whether `interval` meets one of the disjoint `intervals`."""
    began_s, ended_s = interval
    at = bisect.bisect_right(intervals, (ended_s, math.inf)) - 1
    return at >= 0 and began_s <= intervals[at][1]


def _overlap(interval: Interval, intervals: Sequence[Interval]) -> float:
    """Return how many seconds of `interval` lie in the disjoint `intervals`."""
    began_s, ended_s = interval
    at = max(0, bisect.bisect_right(intervals, (began_s, math.inf)) - 1)
    total_s = 0.0
    while at < len(intervals) and intervals[at][0] < ended_s:
        total_s += max(0.0, min(ended_s, intervals[at][1]) - max(began_s, intervals[at][0]))
        at += 1
    return total_s
