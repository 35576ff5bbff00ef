"""Adds up where each device's time went: five parts whose sum is the wall time of the steps.

A step's wall time begins when the devices are free and its data could be requested, and ends with
its update. It is split for each device into

    compute          forward and backward passes of shards
    sum              summing gradients, inside a shard's task
    update           ending a step: loss, division, optimizer
    wait for data    no device could begin yet
    wait for others  the rest: other devices' shards, another device's update, the program itself

No clock: all times and durations are arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

PARTS = ("compute", "wait_data", "wait_others", "sum", "update")
"""The parts of a device's time, in the order in which they are shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceShares:
    """Where one device's time went.

    Attributes:
        device: name of the device.
        compute_s: seconds in forward and backward passes.
        sum_s: seconds in which it summed gradients.
        update_s: seconds in updates.
        wait_data_s: seconds in which it waited for the data of a step.
        wait_others_s: all other seconds inside steps.
        shards: number of shards that it computed.
        stolen: how many of these shards had been assigned to another device.
    """

    device: str
    compute_s: float
    sum_s: float
    update_s: float
    wait_data_s: float
    wait_others_s: float
    shards: int
    stolen: int

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each of the `PARTS`."""
        return {part: getattr(self, f"{part}_s") for part in PARTS}

    @property
    def wall_s(self) -> float:
        """The seconds of all parts together."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Each part's share of the wall time; all 0 before the first step."""
        wall_s = self.wall_s
        return {part: spent / wall_s if wall_s else 0.0 for part, spent in self.seconds.items()}


class Shares(tuple[DeviceShares, ...]):
    """Where the time of all devices went; printed, it is a table with percentages."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the table."""
        head = ["device", *(part.replace("_", " ") for part in PARTS), "shards", "stolen"]
        rows = [
            [
                one.device,
                *(f"{percent}%" for percent in whole_percents(one.shares[part] for part in PARTS)),
                str(one.shards),
                str(one.stolen),
            ]
            for one in self
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in (head, *rows)
        )


class Account:
    """Adds up the work of devices, step by step. Not thread-safe: callers take turns.

    `wall_s` are the seconds of all steps, with the waits for their data; in `wait_data_s` of them
    no device could begin.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self.wall_s = 0.0
        self.wait_data_s = 0.0
        self.steps = 0
        self._ended_s: float | None = None
        lanes = len(self.devices)
        self._spent = {kind: [0.0] * lanes for kind in ("compute", "sum", "update")}
        self._shards = [0] * lanes
        self._stolen = [0] * lanes

    def add(
        self, lane: int, category: str, seconds: float, *, shards: int = 0, stolen: int = 0
    ) -> None:
        """Add work of a lane.

        Args:
            lane: number of its device.
            category: "compute", "sum" or "update"; other categories are ignored.
            seconds: duration. The seconds of a "sum" are also part of a "compute" or an "update".
            shards: number of shards that were computed in this time.
            stolen: how many of these shards had been assigned to another device.
        """
        if category in self._spent:
            self._spent[category][lane] += seconds
            self._shards[lane] += shards
            self._stolen[lane] += stolen

    def add_step(self, opened_s: float, began_s: float, ended_s: float) -> None:
        """Add a step, in the order of their ends; time shared with earlier steps counts once.

        Args:
            opened_s: the earliest time at which the step's data could be used.
            began_s: the time at which the data were there and devices could begin.
            ended_s: the end of the step's update.
        """
        if self._ended_s is not None:
            opened_s = max(opened_s, self._ended_s)
        began_s = max(opened_s, began_s)
        ended_s = max(began_s, ended_s)
        self.wait_data_s += began_s - opened_s
        self.wall_s += ended_s - opened_s
        self.steps += 1
        self._ended_s = ended_s

    def shares(self) -> Shares:
        """Return each device's parts of the time, which add up to `wall_s`."""
        return Shares(map(self._shares_of, range(len(self.devices))))

    def _shares_of(self, lane: int) -> DeviceShares:
        compute_s, sum_s, update_s = (spent[lane] for spent in self._spent.values())
        nested_s = min(sum_s, compute_s)
        update_s = max(0.0, update_s - (sum_s - nested_s))
        compute_s -= nested_s
        busy_s = compute_s + sum_s + update_s
        if busy_s > self.wall_s:  # work of a step that has not ended, or that was abandoned
            scale = self.wall_s / busy_s
            compute_s, sum_s, update_s = compute_s * scale, sum_s * scale, update_s * scale
            busy_s = self.wall_s
        wait_data_s = min(self.wait_data_s, self.wall_s - busy_s)
        return DeviceShares(
            device=self.devices[lane],
            compute_s=compute_s,
            sum_s=sum_s,
            update_s=update_s,
            wait_data_s=wait_data_s,
            wait_others_s=max(0.0, self.wall_s - busy_s - wait_data_s),
            shards=self._shards[lane],
            stolen=self._stolen[lane],
        )


def since(early: DeviceShares, late: DeviceShares) -> DeviceShares:
    """Return the difference of two readings of a device's account."""
    return DeviceShares(
        device=late.device,
        **{f"{part}_s": late.seconds[part] - early.seconds[part] for part in PARTS},
        shards=late.shards - early.shards,
        stolen=late.stolen - early.stolen,
    )


def together(devices: Sequence[DeviceShares]) -> DeviceShares:
    """Return all devices as one: the means of their seconds, and the sums of their shards."""
    count = max(1, len(devices))
    return DeviceShares(
        device="all",
        **{f"{part}_s": sum(device.seconds[part] for device in devices) / count for part in PARTS},
        shards=sum(device.shards for device in devices),
        stolen=sum(device.stolen for device in devices),
    )


def whole_percents(shares: Iterable[float]) -> list[int]:
    """Round shares that add up to 1 to percentages that add up to 100.

    The largest remainders are rounded up (Hamilton's method of apportionment).
    """
    exact = [100 * share for share in shares]
    rounded = [int(value) for value in exact]
    left = round(sum(exact)) - sum(rounded)
    for place in sorted(range(len(exact)), key=lambda at: rounded[at] - exact[at])[:left]:
        rounded[place] += 1
    return rounded
