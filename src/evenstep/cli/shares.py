"""The table that says where the time of the devices went."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from evenstep.cli.columns import aligned
from evenstep.cli.display import print_line
from evenstep.profiling.accounting import DeviceShares, together, whole_percents

_HEADS = (
    ("", "device"),
    ("", "busy"),
    ("waiting", "for data"),
    ("waiting", "for others"),
    ("", "summing"),
    ("", "updating"),
    ("", "shards"),
    ("", "stolen"),
)
_HEAD_LINES = 2


def print_shares(console: Console, devices: Sequence[DeviceShares]) -> None:
    """Print `shares_table`, its head in bold."""
    for number, line in enumerate(shares_table(devices)):
        print_line(console, Text(line, "bold" if number < _HEAD_LINES else ""))


def shares_table(devices: Sequence[DeviceShares]) -> list[str]:
    """Return lines: two of a head, one for each device, and one for all where there are several.

    The percentages of a line add up to 100; where no step was done they are 0.
    """
    whole = [together(devices)] if len(devices) > 1 else []
    return aligned([*zip(*_HEADS, strict=True), *map(_row, [*devices, *whole])])


def _row(device: DeviceShares) -> tuple[str, ...]:
    percents = (f"{percent}%" for percent in whole_percents(device.shares.values()))
    return (device.device, *percents, str(device.shards), str(device.stolen))
