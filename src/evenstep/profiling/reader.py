"""Reads a saved trace and adds up what the devices did in its steps."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.errors import InputError
from evenstep.files import open_file
from evenstep.profiling.accounting import Account, DeviceShares
from evenstep.profiling.text import EVENTS, TraceText

_FIX = "give a file that `Trainer.trace.save` wrote"
_ABOUT = "otherData"
_WORK = ("compute", "sum", "update")
_CATEGORIES = (*_WORK, "copy", "load", "step", "wait")
_SAME_TIME_S = 1e-6  # times in a file are rounded
_MOST_US = 1e15  # no trace is longer
_MOST_EVENTS = 250_000  # an older trace has up to 200,000 spans, and two events for each row
_MOST_ROWS = 10_000  # two for each device, at most 1,024 of a kind
_MOST_LETTERS_OF_A_ROW = 200
_MOST_KEYS = 100  # beside the events

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceAccount:
    """The sums over the steps of a trace.

    Attributes:
        devices: where each device's time went.
        steps: number of steps.
        wall_s: seconds of these steps, including the waits for their data.
        wait_data_s: seconds of these in which no device could begin.
        between_s: seconds between the first and the last step that belong to no step, such as
            testing and saving.
        updating_s: seconds of `wall_s` in which any device was updating.
        shards: the largest number of shards in one step; 0 if the trace does not contain it.
        shard_s: the median seconds of a shard by device, without devices that computed none.
        median_shard_s: the median seconds of all shards; None without shards.
        late_shard_s: the 95th percentile of the seconds of all shards; None without shards.
        stage_s: the median seconds that a shard spends in a stage of the network, forward and
            backward, by stage; empty without stages.
        loads: number of batches that the front end loaded.
        load_s: seconds in which it loaded them.
        longest_load_s: seconds of the longest load.
        overlapped_load_s: seconds of `load_s` during which devices were computing a step.
        copy_s: seconds of all copies to devices.
        dropped: number of older spans that the trace dropped to bound its memory.
        image_formats_ms: the milliseconds of a step over one shard, by the order of its images in
            memory ("contiguous", "channels_last"); empty where that was not measured.
        training: the numbers of what was trained that `evenstep plan` needs; empty where they are
            not known.
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
    stage_s: Mapping[int, float]
    loads: int
    load_s: float
    longest_load_s: float
    overlapped_load_s: float
    copy_s: float
    dropped: int
    image_formats_ms: Mapping[str, float]
    training: Mapping[str, int]


class Event(NamedTuple):
    """A bar of the trace; `category` is empty where it does not matter, and so is `shard`.

    A shard in a stage of the network is a bar forward, and a bar backward.

    Attributes:
        row: the name of its row: a device, "copy " and a device, "front end", or "steps".
        category: what its time counts as.
        began_s, ended_s: seconds since the trace's first bar.
        step, shard, stage: their numbers, where the bar belongs to one.
        stolen: whether the shard was in another device's run.
        backward: whether it is a backward pass in a stage.
    """

    row: str
    category: str
    began_s: float
    ended_s: float
    step: int | None
    shard: int | None
    stolen: bool
    stage: int | None
    backward: bool

    @property
    def interval(self) -> Interval:
        """When it began and ended."""
        return self.began_s, self.ended_s

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s

    @property
    def is_shard(self) -> bool:
        """Whether it is the computation of a shard, or of a part of it."""
        return self.category == "compute" and self.shard is not None


class _About(NamedTuple):
    """What a trace says beside its events."""

    dropped: int
    image_formats_ms: Mapping[str, float]
    training: Mapping[str, int]


class _Step(NamedTuple):
    opened_s: float
    began_s: float
    ended_s: float


def read_trace(file: str | Path) -> tuple[TraceAccount, list[Event]]:
    """Return the sums over the steps of a trace that `Trace.save` wrote, and its bars.

    The file is read event by event, so that it never takes more memory than a full trace.

    Raises:
        InputError: the file can't be read, is not such a trace, or contains no complete step.
    """
    try:
        with open_file(file, may_be_stream=True) as opened:
            parsed = _parse(TraceText(opened).items())
            return _account_of(*parsed), parsed[1]
    except OSError as error:
        raise InputError(f"{file} could not be read ({error.strerror or error}): {_FIX}") from None
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def account_of_trace(document: object) -> TraceAccount:
    """Add up the steps of a trace. Where older spans were dropped, only complete steps count.

    Args:
        document: a JSON object as returned by `Trace.to_json`.

    Raises:
        InputError: `document` is something else, or contains no complete step.
    """
    return _account_of(*_parse(_items(document)))


def events_of_trace(document: object) -> list[Event]:
    """Return the bars of a trace that `Trace.to_json` returned."""
    return _parse(_items(document))[1]


def _account_of(rows: Sequence[str], events: Sequence[Event], about: _About) -> TraceAccount:
    dropped = about.dropped
    steps = _steps(events, dropped)
    devices = _devices(rows, events)
    if not devices:
        raise InputError(_foreign("no row of a device"))
    account = Account(devices)
    for step in steps:
        account.add_step(*step)
    working = _merged((step.began_s, step.ended_s) for step in steps)
    work = [
        event
        for event in events
        if event.row in devices
        and event.category in _WORK
        and _overlap_s(event.interval, working) is not None
    ]
    for event in work:
        stolen, begins = event.is_shard and event.stolen, event.is_shard and not event.backward
        lane = devices.index(event.row)
        account.add(lane, event.category, event.seconds, shards=begins, stolen=stolen)
    shards = [event for event in work if event.is_shard]
    seconds = sorted(shard.seconds for shard in shards)
    since_s = steps[0].opened_s if dropped else -math.inf
    recent = [event for event in events if event.began_s >= since_s]
    loads = [e for e in recent if e.row == "front end" and e.category == "load"]
    updates = _merged(event.interval for event in work if event.category == "update")
    return TraceAccount(
        devices=account.shares(),
        steps=account.steps,
        wall_s=account.wall_s,
        wait_data_s=account.wait_data_s,
        between_s=max(0.0, steps[-1].ended_s - steps[0].opened_s - account.wall_s),
        updating_s=sum(ended_s - began_s for began_s, ended_s in updates),
        shards=_most_shards(shards),
        shard_s=_medians(shards),
        median_shard_s=statistics.median(seconds) if seconds else None,
        late_shard_s=seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
        stage_s=_stages(shards),
        loads=len(loads),
        load_s=sum(load.seconds for load in loads),
        longest_load_s=max((load.seconds for load in loads), default=0.0),
        overlapped_load_s=sum(_overlap_s(load.interval, working) or 0.0 for load in loads),
        copy_s=sum(e.seconds for e in recent if e.category == "copy" and e.row not in devices),
        dropped=dropped,
        image_formats_ms=about.image_formats_ms,
        training=about.training,
    )


# ---- from JSON to events


def _items(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `TraceText.items` yields, of an object that was read before."""
    if not isinstance(document, Mapping):
        raise InputError(_foreign("no JSON object"))
    for key, value in document.items():
        if key == EVENTS and isinstance(value, list):
            yield from ((EVENTS, event) for event in value)
        else:
            yield key, value


def _parse(items: Iterable[tuple[str, Any]]) -> tuple[list[str], list[Event], _About]:
    """Return the names of the rows, the events, and what the file says beside them."""
    names: dict[Any, str] = {}
    events: list[Event] = []
    others: dict[str, Any] = {}
    try:
        for number, (key, value) in enumerate(items):
            if key != EVENTS:
                if key in others:
                    raise ValueError(f"the key {key!r:.40} twice")
                others[key] = value if key == _ABOUT else None
            elif value["ph"] == "X":
                events.append(_event(value, names))
            elif value["ph"] == "M" and value["name"] == "thread_name":
                names[value["pid"], value["tid"]] = _row(value)
            if number > _MOST_EVENTS or len(names) > _MOST_ROWS or len(others) > _MOST_KEYS:
                raise ValueError(
                    f"more than {_MOST_EVENTS:,} events, {_MOST_ROWS:,} rows or {_MOST_KEYS} keys"
                )
        return list(dict.fromkeys(names.values())), events, _about(others[_ABOUT])
    except KeyError as error:
        raise InputError(_foreign(f"{error} is missing")) from None
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise InputError(_foreign(str(error))) from None


def _about(about: Any) -> _About:
    """Return what the file says beside its events, checked."""
    if about["program"] != "evenstep":
        raise ValueError(f"written by {about['program']!r:.40}")
    dropped = int(about["dropped_spans"])
    if dropped < 0:
        raise ValueError(f"{dropped} dropped spans")
    formats_ms = {str(name): float(ms) for name, ms in about.get("image_formats_ms", {}).items()}
    if formats_ms and not (
        formats_ms.keys() == {"contiguous", "channels_last"}
        and all(0 < ms < _MOST_US for ms in formats_ms.values())
    ):
        raise ValueError(f"the times of image formats {formats_ms!r:.100}")
    training = {str(name): _number(about["training"], name) for name in about.get("training", {})}
    known = {name: number for name, number in training.items() if number is not None}
    return _About(dropped, formats_ms, known)


def _row(event: Any) -> str:
    name = str(event["args"]["name"])
    if len(name) > _MOST_LETTERS_OF_A_ROW:
        raise ValueError(f"the name of a row has more than {_MOST_LETTERS_OF_A_ROW} letters")
    return name


def _event(event: Any, names: Mapping[Any, str]) -> Event:
    """Return an event in a row whose name came before it."""
    began_us, took_us = float(event["ts"]), float(event["dur"])
    if not (0 <= began_us < _MOST_US and 0 <= took_us < _MOST_US):
        raise ValueError(f"a span of {took_us} us at {began_us} us")
    row, began_s, story = names[event["pid"], event["tid"]], began_us * 1e-6, dict(event["args"])
    category = next((known for known in _CATEGORIES if known == event["cat"]), "")
    step, shard = _number(story, "step"), _number(story, "shard")
    stolen, backward = story.get("stolen") is True, story.get("backward") is True
    ended_s, stage = began_s + took_us * 1e-6, _number(story, "stage")
    return Event(row, category, began_s, ended_s, step, shard, stolen, stage, backward)


def _number(story: Mapping[str, Any], key: str) -> int | None:
    value = story.get(key)
    if value is not None and not (type(value) is int and 0 <= value < _MOST_US):
        raise ValueError(f"the {key} {value!r:.40}")
    return value


def _foreign(reason: str) -> str:
    return f"not a trace written by evenstep: {reason}. Please {_FIX}"


# ---- from events to steps and shards


def _devices(rows: Sequence[str], events: Iterable[Event]) -> list[str]:
    """Return the rows of devices: those that have a row for copies, or work."""
    copies = {f"copy {row}" for row in rows}
    known = {row for row in rows if f"copy {row}" in rows}
    known |= {event.row for event in events if event.category in _WORK}
    return [row for row in rows if row in known - {"steps", "front end", *copies}]


def _steps(events: Sequence[Event], dropped: int) -> list[_Step]:
    """Return the complete steps, in the order of their ends."""
    own = [event for event in events if event.row == "steps"]
    waits = sorted((event.ended_s, event.began_s) for event in own if event.category == "wait")
    steps = [
        _Step(_opened(event.began_s, waits), event.began_s, event.ended_s)
        for event in own
        if event.category == "step"
    ]
    if not steps:
        raise InputError(f"the trace contains no training steps: {_FIX}")
    if dropped:
        horizon_s = min(event.ended_s for event in events)
        steps = [step for step in steps if step.opened_s >= horizon_s]
        if not steps:
            raise InputError(
                f"the trace contains no complete step, because it dropped {dropped:,} older spans: "
                f"train with fewer shards, which takes fewer spans for a step"
            )
    return sorted(steps, key=lambda step: step.ended_s)


def _opened(began_s: float, waits: Sequence[Interval]) -> float:
    """Return the begin of the wait that ended when a step began; `began_s` if there was none."""
    at = bisect.bisect_left(waits, (began_s - _SAME_TIME_S, -math.inf))
    if at < len(waits) and waits[at][0] <= began_s + _SAME_TIME_S:
        return waits[at][1]
    return began_s


def _most_shards(shards: Iterable[Event]) -> int:
    steps: dict[int | None, set[int | None]] = defaultdict(set)
    for event in shards:
        steps[event.step].add(event.shard)
    return max(map(len, steps.values()), default=0)


def _medians(shards: Iterable[Event]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in shards:
        seconds[event.row].append(event.seconds)
    return {device: statistics.median(values) for device, values in seconds.items()}


def _stages(shards: Iterable[Event]) -> dict[int, float]:
    """Return the median seconds of a shard in each stage, forward and backward together."""
    seconds: dict[int, dict[object, float]] = defaultdict(lambda: defaultdict(float))
    for event in shards:
        if event.stage is not None:
            seconds[event.stage][event.step, event.shard] += event.seconds
    return {stage: statistics.median(seconds[stage].values()) for stage in sorted(seconds)}


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


def _overlap_s(interval: Interval, intervals: Sequence[Interval]) -> float | None:
    """Return the seconds of `interval` inside the disjoint `intervals`; None if it touches none."""
    began_s, ended_s = interval
    at = bisect.bisect_left(intervals, began_s, key=lambda other: other[1])
    overlap_s = None
    while at < len(intervals) and intervals[at][0] <= ended_s:
        shared_s = min(ended_s, intervals[at][1]) - max(began_s, intervals[at][0])
        overlap_s = (overlap_s or 0.0) + shared_s
        at += 1
    return overlap_s
