"""The canonical tree divided among processes: what each one sums, and what remains to be added.

A process computes a contiguous run of shards. It sums the highest nodes of the tree that lie inside
its run: its partial sums. Adding the partial sums of all processes gives the root by the same
additions in the same order as in one process, and so with the same bits, whatever the runs are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from evenstep.collectives.tree import TreePlan, split_point, tree_plan

T = TypeVar("T")


class Forest:
    """The tree over `shards` shards, of which the first `filled` have examples, divided into runs.

    Attributes:
        runs: the shards of each process; together the filled ones, in order.
        plans: what each process sums.
        spans: the shards of each partial sum, of all processes in order.
        owners: the process that computes each partial sum.
        adds: pairs (left, right) of partial sums; adding right onto left, in this order, leaves
            the root in the place of the first partial sum.
    """

    def __init__(self, shards: int, filled: int, runs: Sequence[range]) -> None:
        self.shards, self.filled = shards, filled
        self.runs = tuple(runs)
        self.plans: list[TreePlan] = [tree_plan(shards, filled, run) for run in runs]
        self.spans = [span for plan in self.plans for span in plan.spans]
        self.owners = [rank for rank, plan in enumerate(self.plans) for _ in plan.partials]
        self.adds: list[tuple[int, int]] = []
        self._walk(0, shards)

    def partials_of(self, rank: int) -> list[int]:
        """Return the numbers of a process's partial sums."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def joined(self, groups: Sequence[range]) -> Forest:
        """Return the forest in which each group of neighbouring processes is one process."""
        runs = (range(self.runs[one.start].start, self.runs[one[-1]].stop) for one in groups)
        return forest(self.shards, self.filled, tuple(runs))

    def adds_within(self, group: range) -> tuple[list[int], list[tuple[int, int]]]:
        """Return what a group of neighbouring processes can add up before it knows the others.

        Returns:
            The partial sums that are then left, which are those of the group in `joined`, and the
            additions, as in `adds`.
        """
        own = {number for number, owner in enumerate(self.owners) if owner in group}
        left_over, adds = set(own), []
        for left, right in self.adds:
            if left in own and right in own:
                adds.append((left, right))
                left_over.discard(right)
            else:
                own -= {left, right}
        return sorted(left_over), adds

    def add_up(self, partials: Sequence[T], add: Callable[[T, T], T]) -> T:
        """Return the root, given all partial sums; `add(left, right)` may reuse its left."""
        values = list(partials)
        for left, right in self.adds:
            values[left] = add(values[left], values[right])
        return values[0]

    def _walk(self, lo: int, hi: int) -> int | None:
        """Record the additions below the node [lo, hi); return which partial sum then holds it."""
        inside = [n for n, span in enumerate(self.spans) if span.start < hi and lo < span.stop]
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
    """Return the `Forest` of these arguments, cached: most steps have the same one."""
    return Forest(shards, filled, runs)
