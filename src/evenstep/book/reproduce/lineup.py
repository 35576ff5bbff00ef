"""What the book's experiments with the engine are made of: each measurement and its job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Sizes = Mapping[str, Mapping[str, Any]]

BOOK: Sizes = {
    "queued": {"size": 2000, "repeats": 10},
    "waiting.add": {"operation": "add", "size": 2000, "count": 1000},
    "waiting.mm": {"operation": "mm", "size": 600, "count": 1000},
    "together": {"size": 2000, "count": 10},
    "copies.square": {"size": 2000, "inner": 2000, "count": 10, "repeats": 3},
    "copies.thin": {"size": 2000, "inner": 32, "count": 50, "repeats": 5},
    "memory": {"examples": 1024, "batches": 100},
    "cost": {"tasks": 100_000},
}
QUICK: Sizes = {  # to see what the book saw, in less time
    "queued": {"size": 2000, "repeats": 3},
    "waiting.add": {"operation": "add", "size": 2000, "count": 200},
    "waiting.mm": {"operation": "mm", "size": 600, "count": 200},
    "together": {"size": 2000, "count": 3},
    "copies.square": {"size": 2000, "inner": 2000, "count": 3, "repeats": 1},
    "copies.thin": {"size": 2000, "inner": 32, "count": 20, "repeats": 2},
    "memory": {"examples": 1024, "batches": 25},
    "cost": {"tasks": 10_000},
}
TINY: Sizes = {  # to see that everything runs
    "queued": {"size": 8, "repeats": 2},
    "waiting.add": {"operation": "add", "size": 8, "count": 4},
    "waiting.mm": {"operation": "mm", "size": 8, "count": 4},
    "together": {"size": 8, "count": 2},
    "copies.square": {"size": 8, "inner": 8, "count": 2, "repeats": 1},
    "copies.thin": {"size": 8, "inner": 2, "count": 2, "repeats": 2},
    "memory": {"examples": 4, "batches": 3},
    "cost": {"tasks": 40},
}
CONTENDERS = ("engine", "bare")
WAITING = ("waiting.add", "waiting.mm")
PARALLEL = ("together", "copies.square", "copies.thin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A fresh process of its own, once a round.

    Attributes:
        key: experiment, contender and way, such as "waiting.add.engine.each".
        module: whose `measure` is run in it.
        job: its argument.
    """

    key: str
    module: str
    job: Mapping[str, Any]


def lineup(sizes: Sizes) -> list[Measurement]:
    """Return every measurement of every experiment."""
    names: list[tuple[str, dict[str, str]]] = [("queued", {})]
    for contender in CONTENDERS:
        for waits in ("each", "end"):
            names += [(one, {"contender": contender, "waits": waits}) for one in WAITING]
        for way in ("apart", "together"):
            names += [(one, {"contender": contender, "way": way}) for one in PARALLEL]
    for maker in ("front", "tasks"):
        names += [("memory", {"maker": maker, "bound": one}) for one in ("waits", "none", "two")]
    names += [("cost", {"contender": one}) for one in ("engine", "chain", "pool")]
    return [_measurement(experiment, sizes, more) for experiment, more in names]


def _measurement(experiment: str, sizes: Sizes, names: Mapping[str, str]) -> Measurement:
    return Measurement(
        key=".".join([experiment, *names.values()]),
        module=f"evenstep.book.reproduce.engine.{experiment.split('.')[0]}",
        job={**sizes[experiment], **names},
    )
