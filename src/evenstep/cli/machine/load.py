"""How many cores other programs use, from Linux's counters in /proc/stat."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_CORE = re.compile(r"^cpu(?P<core>\d+) (?P<ticks>[\d ]+)$", re.MULTILINE)
_IDLE = slice(3, 5)  # idle, and waiting for a disk
_COUNTED = slice(0, 8)  # the rest, time of virtual machines, is contained in these


class Ticks(NamedTuple):
    """Clock ticks of a core since the machine started."""

    busy: int
    all: int


def core_ticks(stat: str) -> dict[int, Ticks]:
    """Return the ticks of each core, from the text of /proc/stat (see proc_stat(5))."""
    found = {}
    for core in _CORE.finditer(stat):
        ticks = [int(one) for one in core["ticks"].split()]
        whole = sum(ticks[_COUNTED])
        found[int(core["core"])] = Ticks(whole - sum(ticks[_IDLE]), whole)
    return found


def busy_cores(
    before: Mapping[int, Ticks], after: Mapping[int, Ticks], cores: Collection[int]
) -> float:
    """Return how many of `cores` were busy on average, such as 1.5, between two readings."""
    shares = [
        (after[core].busy - before[core].busy) / max(1, after[core].all - before[core].all)
        for core in cores
        if core in before and core in after
    ]
    return sum(shares)


def cores_used_by_others(seconds: float = 0.5) -> float | None:
    """Watch the cores that this process may use, while it sleeps; None where that is unknown."""
    if not _STAT.exists() or not hasattr(os, "sched_getaffinity"):
        return None
    before = core_ticks(_STAT.read_text(encoding="utf-8"))
    time.sleep(seconds)
    after = core_ticks(_STAT.read_text(encoding="utf-8"))
    return busy_cores(before, after, os.sched_getaffinity(0))
