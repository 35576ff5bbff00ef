"""Assigns shards to devices and to processes, in proportion to their speeds.

Everything here is a pure function of its arguments, so all processes compute the same assignment.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def contiguous_runs(items: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Divide `items` into contiguous runs, one for each speed and in proportion to it.

    Lengths are rounded by largest remainders (Hamilton's apportionment; of equal remainders the
    first counts as larger): with equal speeds they differ by at most one, the longer runs first.

    Args:
        items: what is divided, in order.
        speeds: relative speeds, at least 0 and not all 0.
    """
    total = sum(speeds)
    shares = [len(items) * speed / total for speed in speeds]
    lengths = [int(share) for share in shares]
    by_remainder = sorted(
        range(len(speeds)), key=lambda device: (lengths[device] - shares[device], device)
    )
    for device in by_remainder[: len(items) - sum(lengths)]:
        lengths[device] += 1
    ends = list(itertools.accumulate(lengths))
    return [list(items[end - n : end]) for n, end in zip(lengths, ends, strict=True)]


PERIOD_STEPS = 64
"""The runs of a batch are known at least half as many steps ahead."""


class ProcessAssignment:
    """Assigns each process a contiguous run of shards, in proportion to its measured speed.

    Speeds that are reported in the middle of a period take effect at the start of the next. So
    batches that were loaded ahead have the right shards, and all processes use the same runs for a
    step, even if one is some steps ahead.

    Args:
        speeds: relative speeds of the processes, used until speeds are measured.
    """

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = {-1: tuple(speeds)}  # by the period in which they were reported

    def runs(self, filled: int, step: int) -> tuple[range, ...]:
        """Return the shards of each process in step `step`, of which `filled` have examples."""
        period = max(period for period in self._speeds if period < step // PERIOD_STEPS)
        runs = contiguous_runs(range(filled), self._speeds[period])
        ends = itertools.accumulate(len(run) for run in runs)
        return tuple(range(end - len(run), end) for run, end in zip(runs, ends, strict=True))

    def record_speeds(self, step: int, speeds: Sequence[float]) -> None:
        """Record the speeds that the processes reported in a step; an unknown speed is 0."""
        period, into = divmod(step, PERIOD_STEPS)
        if into == PERIOD_STEPS // 2 and all(speeds):
            self._speeds[period] = tuple(speeds)
            for old in sorted(self._speeds)[:-3]:
                del self._speeds[old]
