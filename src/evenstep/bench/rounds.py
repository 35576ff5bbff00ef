"""The arithmetic of interleaved rounds: order, medians, ratios, speed-ups. Pure functions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from evenstep.profiling.accounting import PARTS

T = TypeVar("T")
Run = Mapping[str, Any]
"""One measurement in a result file: its round, what was measured, and the figures."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Median and extremes of one figure, and the number of values."""

    median: float
    least: float
    most: float
    rounds: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled:
    """Training on one number of devices."""

    devices: int  # number of devices
    examples: int  # batch size
    speed: Summary  # examples per second
    speed_up: Summary  # speed over that of the smallest number of devices, taken within each round
    efficiency: float  # median speed-up over the ideal one
    # share of the devices' time for each of `accounting.PARTS`, over all rounds
    shares: dict[str, float]


def rotated(items: Sequence[T], round_number: int) -> list[T]:
    """Return `items` in the order of round `round_number`: each round starts one item later.

    Over the rounds, no item always follows the same neighbour, pause or warm cache.
    """
    start = round_number % len(items) if items else 0
    return [*items[start:], *items[:start]]


def summarise(values: Sequence[float]) -> Summary:
    """Return the median and the extremes of at least one value."""
    return Summary(statistics.median(values), min(values), max(values), len(values))


def paired_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return ours / theirs for every round in which both were measured.

    Both were measured within minutes of each other, so a slow drift of the machine cancels out.
    """
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def select(runs: Sequence[Run], **names: Any) -> list[Run]:
    """Return the runs whose fields have these values, such as contender="lenet.ddp.2"."""
    return [run for run in runs if all(run[name] == value for name, value in names.items())]


def by_round(runs: Sequence[Run], figure: str, **names: Any) -> dict[int, float]:
    """Return one figure of the selected runs, by round."""
    return {run["round"]: run[figure] for run in select(runs, **names)}


def speeds(runs: Sequence[Run], key: str) -> dict[int, float]:
    """Return a contender's examples per second, by round."""
    return by_round(runs, "examples_per_s", contender=key)


def against(document: Mapping[str, Any], key: str) -> dict[str, Summary]:
    """Return each contender's speed over that of contender `key`, taken within each round."""
    runs, keys = document["runs"], [one["key"] for one in document["contenders"]]
    ratios = {one: paired_ratios(speeds(runs, one), speeds(runs, key)) for one in keys}
    return {one: summarise(values) for one, values in ratios.items() if values}


def scaled(document: Mapping[str, Any], *, same_batch: bool) -> list[Scaled]:
    """Return a row for each number of devices, the smallest first.

    Args:
        document: the results of `evenstep bench scaling`.
        same_batch: whether to return the runs with the same batch (strong scaling) or with a batch
            that grows with the number of devices (weak scaling).
    """
    first, *others = document["contenders"]
    rows = [first] + [one for one in others if (one["examples"] == first["examples"]) == same_batch]
    speed_ups = against(document, first["key"])
    found = []
    for row in rows:
        runs = select(document["runs"], contender=row["key"])
        totals = {part: sum(run["spent_s"][part] for run in runs) for part in PARTS}
        whole, speed_up = sum(totals.values()), speed_ups[row["key"]]
        found.append(
            Scaled(
                devices=row["workers"],
                examples=row["examples"],
                speed=summarise([run["examples_per_s"] for run in runs]),
                speed_up=speed_up,
                efficiency=speed_up.median * first["workers"] / row["workers"],
                shares={part: total / whole if whole else 0.0 for part, total in totals.items()},
            )
        )
    return found
