"""The arithmetic of interleaved rounds: order, medians, ratios. Pure functions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Summary:
    """The rounds of one figure: their median and extremes, and how many there were."""

    median: float
    least: float
    most: float
    rounds: int


def rotated(items: Sequence[T], round_number: int) -> list[T]:
    """Return `items` in the order of round `round_number`: each round starts one item later.

    So over the rounds no item always follows the same long pause or the same warm cache.
    """
    start = round_number % len(items) if items else 0
    return [*items[start:], *items[:start]]


def summarise(values: Sequence[float]) -> Summary:
    """Return the median and the extremes of one figure over the rounds (at least one)."""
    return Summary(statistics.median(values), min(values), max(values), len(values))


def paired_ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Return ours / theirs for every round in which both were measured.

    Ratios are taken within a round, minutes apart at most, so that a slow drift of the machine
    falls out of them.
    """
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]
