"""Where the time of the devices went: five parts that add up to the wall time of the steps.

A step's wall time begins when the devices are free for it and its data may come, and ends with its
update. For each device it is split into

    compute          forward and backward of shards
    sum              adding up nodes of the tree, which happens inside a shard's task
    update           ending a step: loss, division, optimizer
    wait for data    nothing could begin yet
    wait for others  the rest: other devices' shards, another device's update, the program itself

Pure: fed with durations and times, by whatever clock.
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
        device: its name.
        compute_s: seconds in shards, forward and backward.
        sum_s: seconds in sums of the tree.
        update_s: seconds in updates.
        wait_data_s: seconds in which the data of the step were not there.
        wait_others_s: seconds inside steps in which the device did none of these.
        shards: shards that it computed.
        stolen: how many of them it took over from another device's run.
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
        """Each part's share of the wall time; all 0 where there was none."""
        wall_s = self.wall_s
        return {part: spent / wall_s if wall_s else 0.0 for part, spent in self.seconds.items()}


class Account:
    """Adds up what devices do, told step by step.

    Cheap and without a lock: whoever calls from several threads lets one in at a time.

    Attributes:
        devices: their names, in the order of the lanes.
        wall_s: seconds of all steps, with the waiting for their data.
        wait_data_s: seconds of it in which no device could begin.
        steps: how many there were.
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
        self,
        lane: int,
        category: str,
        seconds: float,
        *,
        shards: int = 0,
        stolen: int = 0,
    ) -> None:
        """Note what a lane did.

        Args:
            lane: the number of its device.
            category: "compute", "sum" or "update"; anything else is left out of the account.
            seconds: how long. Those of a "sum" lie inside a "compute" (or an "update") that is
                added too, earlier or later, with all its seconds.
            shards: how many shards were computed in these seconds.
            stolen: how many of them were in another device's run.
        """
        spent = self._spent.get(category)
        if spent is None:
            return
        spent[lane] += seconds
        self._shards[lane] += shards
        self._stolen[lane] += stolen

    def add_step(self, opened_s: float, began_s: float, ended_s: float) -> None:
        """Note a step, in the order of their ends; what overlaps the step before counts once.

        Args:
            opened_s: when the step's data might have come.
            began_s: when they were there, and devices could begin.
            ended_s: when its update had ended.
        """
        if self._ended_s is not None:
            opened_s = max(opened_s, self._ended_s)
        began_s = max(opened_s, began_s)
        ended_s = max(began_s, ended_s)
        self.wait_data_s += began_s - opened_s
        self.wall_s += ended_s - opened_s
        self.steps += 1
        self._ended_s = ended_s

    def shares(self) -> tuple[DeviceShares, ...]:
        """Return each device's part of the time; the parts add up to `wall_s`."""
        return tuple(map(self._shares_of, range(len(self.devices))))

    def _shares_of(self, lane: int) -> DeviceShares:
        compute_s, sum_s, update_s = (spent[lane] for spent in self._spent.values())
        nested_s = min(sum_s, compute_s)
        update_s = max(0.0, update_s - (sum_s - nested_s))
        compute_s -= nested_s
        busy_s = compute_s + sum_s + update_s
        if busy_s > self.wall_s:  # work of a step that has not ended, or that was given up
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
    """Return what a device did between two looks at its account."""
    return DeviceShares(
        device=late.device,
        **{f"{part}_s": late.seconds[part] - early.seconds[part] for part in PARTS},
        shards=late.shards - early.shards,
        stolen=late.stolen - early.stolen,
    )


def together(devices: Sequence[DeviceShares]) -> DeviceShares:
    """Return all devices as one: the means of their seconds, the sums of their shards."""
    count = max(1, len(devices))
    return DeviceShares(
        device="all",
        compute_s=sum(device.compute_s for device in devices) / count,
        sum_s=sum(device.sum_s for device in devices) / count,
        update_s=sum(device.update_s for device in devices) / count,
        wait_data_s=sum(device.wait_data_s for device in devices) / count,
        wait_others_s=sum(device.wait_others_s for device in devices) / count,
        shards=sum(device.shards for device in devices),
        stolen=sum(device.stolen for device in devices),
    )


def whole_percents(shares: Iterable[float]) -> list[int]:
    """Round shares that add up to 1 so that they add up to 100: by the largest remainders.

    (Hamilton's method of apportionment; of equal remainders the first goes first.)
    """
    exact = [100 * share for share in shares]
    rounded = [int(value) for value in exact]
    left = round(sum(exact)) - sum(rounded)
    for place in sorted(range(len(exact)), key=lambda at: rounded[at] - exact[at])[:left]:
        rounded[place] += 1
    return rounded
