"""The canonical tree: one order of summation for every layout.

A node covers the shards [lo, hi) and splits at lo + the largest power of two smaller than hi − lo;
its value is left + right. An empty shard contributes nothing: its sibling is the node's value.
Floating-point addition is not associative, so this order *is* the result. It is pairwise summation,
whose error grows with the logarithm of the number of terms (Higham, The Accuracy of Floating Point
Summation, 1993).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


def split_point(lo: int, hi: int) -> int:
    """Return where the node [lo, hi), hi − lo ≥ 2, splits."""
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def tree_sum(leaves: Sequence[T | None], add: Callable[[T, T], T]) -> T | None:
    """Sum `leaves` (None for an empty shard) in canonical order; None if all are empty.

    Neighbours are added level by level, a last one without a neighbour going up as it is: that is
    the canonical tree, from its leaves up.
    """
    level = list(leaves)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        above = [
            right if left is None else left if right is None else add(left, right)
            for left, right in pairs
        ]
        level = above + level[len(above) * 2 :]
    return level[0] if level else None


class TreePlan:
    """Who is summed with whom, for `shards` shards of which those not in `filled` are empty.

    Leaves are numbered as their shards, inner nodes from `shards` on.

    Attributes:
        parent, sibling: node to node, for every node but the root.
        lefts: the nodes that are left children.
        root: the node whose value is the sum; -1 where every shard is empty.
    """

    def __init__(self, shards: int, filled: Sequence[int]) -> None:
        self.parent: dict[int, int] = {}
        self.sibling: dict[int, int] = {}
        self.lefts: set[int] = set()
        self._filled = frozenset(filled)
        self._next = shards
        self.root = self._build(0, shards)

    def _build(self, lo: int, hi: int) -> int:
        if hi - lo == 1:
            return lo if lo in self._filled else -1
        middle = split_point(lo, hi)
        left, right = self._build(lo, middle), self._build(middle, hi)
        if left < 0 or right < 0:
            return max(left, right)
        node = self._next
        self._next += 1
        self.parent[left] = self.parent[right] = node
        self.sibling[left], self.sibling[right] = right, left
        self.lefts.add(left)
        return node


@functools.cache
def tree_plan(shards: int, filled: int) -> TreePlan:
    """Return the plan for `shards` shards of which the first `filled` are not empty."""
    return TreePlan(shards, range(filled))


class TreeSum(Generic[T]):
    """A sum under way: lanes put values of nodes in any order, from any thread.

    Whoever brings the second child of a node adds the two (left first) and carries the value up.
    `add(left, right)` may reuse the memory of both: neither is read again.
    """

    def __init__(self, plan: TreePlan, add: Callable[[T, T], T]) -> None:
        self._plan = plan
        self._add = add
        self._waiting: dict[int, T] = {}
        self._lock = threading.Lock()

    def claim(self, shard: int, fits: Callable[[T], bool]) -> tuple[int, T | None]:
        """Say where the value of `shard` goes, and what it may be accumulated onto.

        Where the left sibling of `shard` is there already (and `fits`), it is handed out: the
        caller adds the shard's value to it and puts the sum at the node returned, their parent.
        """
        plan = self._plan
        left = plan.sibling.get(shard)
        if left is None or left not in plan.lefts:
            return shard, None
        with self._lock:
            if left in self._waiting and fits(self._waiting[left]):
                return plan.parent[shard], self._waiting.pop(left)
        return shard, None

    def put(self, node: int, value: T) -> None:
        """Bring the value of `node`, and sum upwards as far as siblings are there."""
        plan = self._plan
        while node != plan.root:
            with self._lock:
                if plan.sibling[node] not in self._waiting:
                    self._waiting[node] = value
                    return
                other = self._waiting.pop(plan.sibling[node])
            value = self._add(value, other) if node in plan.lefts else self._add(other, value)
            node = plan.parent[node]
        self._waiting[node] = value

    def take_root(self) -> T:
        """Return the sum; every shard's value must have been put."""
        return self._waiting.pop(self._plan.root)
