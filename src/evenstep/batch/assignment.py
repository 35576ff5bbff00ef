"""Which process computes which shards, and when that changes: pure, and so the same everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def contiguous_runs(items: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Deal `items` in their order to devices, to each a run as long as its speed deserves.

    Largest remainders (Hamilton's apportionment; of equal ones, the first devices'): equal speeds
    get runs whose lengths differ by at most one, the longer ones first.

    Args:
        items: what is dealt.
        speeds: of each device, relative to each other, at least 0; not all 0.
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
"""The runs of a batch are settled at least half as many steps ahead."""


class Dealing:
    """Deals shards to processes: runs as long as their speeds deserve.

    What processes tell each other in the middle of a period counts from the next period on. Then
    batches that are loaded ahead fit, and every process deals alike, however far it is.

    Args:
        speeds: of the processes, relative to each other, until they are measured.
    """

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = {-1: tuple(speeds)}  # by the period in which they were told

    def runs(self, filled: int, step: int) -> tuple[range, ...]:
        """Return for each process its shards of step `step`, of which `filled` have examples."""
        told = max(period for period in self._speeds if period < step // PERIOD_STEPS)
        runs = contiguous_runs(range(filled), self._speeds[told])
        ends = itertools.accumulate(len(run) for run in runs)
        return tuple(range(end - len(run), end) for run, end in zip(runs, ends, strict=True))

    def hear(self, step: int, speeds: Sequence[float]) -> None:
        """Note what all told each other in a step; 0 is the speed of one that doesn't know it."""
        period, into = divmod(step, PERIOD_STEPS)
        if into == PERIOD_STEPS // 2 and all(speeds):
            self._speeds[period] = tuple(speeds)
            for old in sorted(self._speeds)[:-3]:
                del self._speeds[old]
