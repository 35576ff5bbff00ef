"""The canonical tree, cut over processes: what each sums by itself, and what is left to add.

A process owns a contiguous run of shards. It sums the highest nodes that lie inside its run: its
tops. Adding up the tops of all processes in the tree gives the root: the same additions in the same
order as in one process, so the same bits, whatever the runs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from evenstep.collectives.tree import TreePlan, split_point, tree_plan

T = TypeVar("T")


class Forest:
    """The tree over `shards` shards (the first `filled` not empty) over the processes' `runs`.

    Attributes:
        runs: for each process its shards; together they are the filled ones, in order.
        plans: for each process what it sums by itself.
        spans: the shards of each top, of all processes in order.
        owners: for each top the process that sums it.
        adds: pairs (left, right) of tops; adding right onto left, in this order, leaves the root
            in the place of the first top.
    """

    def __init__(self, shards: int, filled: int, runs: Sequence[range]) -> None:
        self.runs = tuple(runs)
        self.plans: list[TreePlan] = [tree_plan(shards, filled, run) for run in runs]
        self.spans = [span for plan in self.plans for span in plan.spans]
        self.owners = [rank for rank, plan in enumerate(self.plans) for _ in plan.tops]
        self.adds: list[tuple[int, int]] = []
        self._walk(0, shards)

    def tops_of(self, rank: int) -> list[int]:
        """Return the numbers of the tops of a process."""
        return [top for top, owner in enumerate(self.owners) if owner == rank]

    def add_up(self, tops: Sequence[T], add: Callable[[T, T], T]) -> T:
        """Return the root's value from those of all tops; `add(left, right)` may reuse its left."""
        values = list(tops)
        for left, right in self.adds:
            values[left] = add(values[left], values[right])
        return values[0]

    def _walk(self, lo: int, hi: int) -> int | None:
        """Note the additions below the node [lo, hi); return the top that then holds its value."""
        inside = [top for top, span in enumerate(self.spans) if span.start < hi and lo < span.stop]
        if len(inside) < 2:
            return inside[0] if inside else None
        middle = split_point(lo, hi)
        left, right = self._walk(lo, middle), self._walk(middle, hi)
        if left is None or right is None:
            return right if left is None else left
        self.adds.append((left, right))
        return left


@functools.lru_cache(maxsize=64)
def forest(shards: int, filled: int, runs: tuple[range, ...]) -> Forest:
    """Return the forest of `runs`; kept, for it is the same in every step."""
    return Forest(shards, filled, runs)
