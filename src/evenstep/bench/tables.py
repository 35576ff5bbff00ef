"""From runs to what a person asks: how much faster, and where the rest of the time went. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.bench.rounds import Summary, paired_ratios, summarise
from evenstep.profiling.accounting import PARTS

Run = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled:
    """How a job runs on some number of devices.

    Attributes:
        devices: how many.
        examples: in a batch.
        speed: examples a second.
        speed_up: over the least number of devices, round by round.
        efficiency: the speed-up over what the devices alone would bring.
        shares: each of `account.PARTS`: its share of the devices' time, over all rounds.
    """

    devices: int
    examples: int
    speed: Summary
    speed_up: Summary
    efficiency: float
    shares: dict[str, float]


def scaled(document: Mapping[str, Any], *, same_batch: bool) -> list[Scaled]:
    """Return a row for each number of devices, the least first.

    Args:
        document: of a run of `evenstep bench scaling`.
        same_batch: whether the batch stays the same (strong scaling) or grows with the number of
            devices (weak scaling).
    """
    first, *others = document["contenders"]
    rows = [first] + [one for one in others if (one["examples"] == first["examples"]) == same_batch]
    base = speeds(document["runs"], first["key"])
    return [_scaled(document["runs"], row, base, first["workers"]) for row in rows]


def against(document: Mapping[str, Any], key: str) -> dict[str, Summary]:
    """Return every contender's speed over that of `key`, round by round."""
    base = speeds(document["runs"], key)
    ratios = {
        one["key"]: paired_ratios(speeds(document["runs"], one["key"]), base)
        for one in document["contenders"]
    }
    return {name: summarise(values) for name, values in ratios.items() if values}


def speeds(runs: Sequence[Run], key: str) -> dict[int, float]:
    """Return a contender's examples a second, by round."""
    return {run["round"]: run["examples_per_s"] for run in runs if run["contender"] == key}


def _scaled(
    runs: Sequence[Run], row: Mapping[str, Any], base: dict[int, float], base_devices: int
) -> Scaled:
    mine = speeds(runs, row["key"])
    spent = [run["spent_s"] for run in runs if run["contender"] == row["key"]]
    totals = {part: sum(one[part] for one in spent) for part in PARTS}
    whole = sum(totals.values())
    speed_up = summarise(paired_ratios(mine, base))
    return Scaled(
        devices=row["workers"],
        examples=row["examples"],
        speed=summarise(list(mine.values())),
        speed_up=speed_up,
        efficiency=speed_up.median * base_devices / row["workers"],
        shares={part: total / whole if whole else 0.0 for part, total in totals.items()},
    )
