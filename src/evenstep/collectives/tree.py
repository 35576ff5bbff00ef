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


_ELSEWHERE = -1  # stands for a shard that is summed elsewhere


class TreePlan:
    """Who is summed with whom: `shards` shards, those not in `filled` empty, those of `mine` here.

    Leaves are numbered as their shards, inner nodes from `shards` on. A node is summed here when
    all its shards are of `mine`; the highest such nodes are the tops. Where every shard is here,
    there is one: the root.

    Attributes:
        parent, sibling: node to node, for every node below a top.
        lefts: the nodes that are left children.
        tops: the nodes whose parents are not summed here, in the order of their shards.
        spans: for each top its shards with examples: from the first to the last.
    """

    def __init__(
        self, shards: int, filled: Sequence[int], mine: Sequence[int] | None = None
    ) -> None:
        self.parent: dict[int, int] = {}
        self.sibling: dict[int, int] = {}
        self.lefts: set[int] = set()
        self._filled = frozenset(filled)
        self._mine = self._filled if mine is None else self._filled.intersection(mine)
        self._spans: dict[int, range] = {}
        self._next = shards
        self.tops = [node for node in self._build(0, shards) if node >= 0]
        self.spans = [self._spans[node] for node in self.tops]

    def _build(self, lo: int, hi: int) -> list[int]:
        """Return what stands for the node [lo, hi): nothing, itself, or the tops inside it."""
        if hi - lo == 1:
            return self._leaf(lo)
        middle = split_point(lo, hi)
        found = self._build(lo, middle) + self._build(middle, hi)
        return found if len(found) < 2 or _ELSEWHERE in found else [self._join(*found)]

    def _leaf(self, shard: int) -> list[int]:
        if shard not in self._filled:
            return []
        if shard not in self._mine:
            return [_ELSEWHERE]
        self._spans[shard] = range(shard, shard + 1)
        return [shard]

    def _join(self, left: int, right: int) -> int:
        node = self._next
        self._next += 1
        self.parent[left] = self.parent[right] = node
        self.sibling[left], self.sibling[right] = right, left
        self.lefts.add(left)
        self._spans[node] = range(self._spans[left].start, self._spans[right].stop)
        return node


@functools.cache
def tree_plan(shards: int, filled: int, mine: range | None = None) -> TreePlan:
    """Return the plan for `shards` shards, the first `filled` not empty, those of `mine` here."""
    return TreePlan(shards, range(filled), mine)


class TreeSum(Generic[T]):
    """A sum under way: lanes put values of nodes in any order, from any thread.

    Whoever brings the second child of a node adds the two (left first) and carries the value up.

    Args:
        plan: which shards, and who is added to whom.
        add: `add(left, right)`; it may reuse the memory of both: neither is read again.
        close: `close(top, left, right)` is called with what makes a top (numbered as in
            `plan.tops`), instead of adding and keeping it; right is None for a value that is whole.
    """

    def __init__(
        self,
        plan: TreePlan,
        add: Callable[[T, T], T],
        close: Callable[[int, T, T | None], None] | None = None,
    ) -> None:
        self._plan = plan
        self._add = add
        self._close = close
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

    def take(self, node: int) -> T:
        """Take back the value of a node whose sibling is not there yet."""
        with self._lock:
            return self._waiting.pop(node)

    def put(self, node: int, value: T) -> None:
        """Bring the value of `node`, and sum upwards as far as siblings are there."""
        plan = self._plan
        while node in plan.parent:
            with self._lock:
                if plan.sibling[node] not in self._waiting:
                    self._waiting[node] = value
                    return
                other = self._waiting.pop(plan.sibling[node])
            left, right = (value, other) if node in plan.lefts else (other, value)
            node = plan.parent[node]
            if self._close is not None and node not in plan.parent:
                self._close(plan.tops.index(node), left, right)
                return
            value = self._add(left, right)
        if self._close is not None:
            self._close(plan.tops.index(node), value, None)
        else:
            self._waiting[node] = value

    def take_tops(self) -> list[T]:
        """Return the sums of the plan's tops; every shard's value must have been put."""
        return [self._waiting.pop(node) for node in self._plan.tops]
