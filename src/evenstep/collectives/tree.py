"""The canonical tree: one order of summation for every set of devices.

A node covers the shards [lo, hi) and splits at lo + the largest power of two smaller than hi − lo;
its value is left + right. An empty shard contributes nothing: its sibling is the node's value.
Floating-point addition is not associative, so this order defines the result. It is pairwise
summation, whose error grows with the logarithm of the number of terms (Higham, The Accuracy of
Floating Point Summation, 1993).
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


def split_point(lo: int, hi: int) -> int:
    """Return where the node [lo, hi), hi − lo ≥ 2, splits."""
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def tree_sum(leaves: Sequence[T | None], add: Callable[[T, T], T]) -> T | None:
    """Sum `leaves` (None for an empty shard) in canonical order; None if all are empty.

    Adding neighbours level by level, and passing a last one without a neighbour on to the next
    level, builds the canonical tree from its leaves.
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


_ELSEWHERE = -1  # stands for a shard that another process sums


class TreePlan:
    """Which values are added in this process, for a tree over `shards` shards.

    Leaves are numbered as their shards, inner nodes from `shards` on. A node is summed here if all
    its filled shards are in `mine`; the highest such nodes are the partial sums. If every shard is
    here, the only partial sum is the root. `filled` are the shards that have examples, `mine` those
    that this process computes; None for all.

    Attributes:
        parent, sibling: node to node, for every node below a partial sum.
        lefts: the nodes that are left children.
        partials: the nodes whose parents are not summed here, in the order of their shards.
        spans: the shards of each partial sum, from the first filled one to the last.
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
        self._nodes: dict[range, int] = {}
        self._next = shards
        self.partials = [node for node in self._build(0, shards) if node >= 0]
        self.spans = [self._spans[node] for node in self.partials]

    def _build(self, lo: int, hi: int) -> list[int]:
        """Return what stands for the node [lo, hi): nothing, itself, or its partial sums."""
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

    def nodes(self) -> Iterable[range]:
        """Return the shards of each node that is summed here, leaves too."""
        return self._spans.values()

    def node_of(self, shards: range) -> int:
        """Return the node of some shards."""
        if not self._nodes:
            self._nodes = {span: node for node, span in self._spans.items()}
        return self._nodes[shards]


@functools.cache
def tree_plan(shards: int, filled: int, mine: range | None = None) -> TreePlan:
    """Return the `TreePlan` whose first `filled` shards have examples, cached."""
    return TreePlan(shards, range(filled), mine)


class TreeSum(Generic[T]):
    """A tree sum in progress, to which any thread adds the values of nodes in any order.

    The thread that puts the second child of a node adds the two, left first, and continues with
    their parent.

    Args:
        plan: which values are added to which.
        add: `add(left, right)`; it may reuse the memory of both, which are not read again.
        close: called instead of adding and keeping, as `close(number, left, right)`, when both
            children of a partial sum are there; `number` is its place in `plan.partials`. A partial
            sum that was put whole is `left`, and `right` is None.
    """

    def __init__(
        self,
        plan: TreePlan,
        add: Callable[[T, T], T],
        close: Callable[[int, T, T | None], None] | None = None,
    ) -> None:
        self.plan = plan
        self._add = add
        self._close = close
        self._waiting: dict[int, T] = {}
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of values that wait for their siblings."""
        return len(self._waiting)

    def claim(self, shard: int, fits: Callable[[T], bool]) -> tuple[int, T | None]:
        """Return the node to put the value of `shard` at, and a value to accumulate it onto.

        If the left sibling of `shard` is there, and `fits`, it is handed out: the caller adds the
        shard's value to it and puts the sum at the returned node, their parent. Otherwise the
        caller puts the value at the shard's own node.
        """
        plan = self.plan
        left = plan.sibling.get(shard)
        if left is None or left not in plan.lefts:
            return shard, None
        with self._lock:
            if left in self._waiting and fits(self._waiting[left]):
                return plan.parent[shard], self._waiting.pop(left)
        return shard, None

    def take(self, node: int) -> T:
        """Remove and return the value of a node whose sibling is not there yet."""
        with self._lock:
            return self._waiting.pop(node)

    def put(self, node: int, value: T) -> None:
        """Put the value of `node`, and add upwards while siblings are there."""
        plan = self.plan
        while node in plan.parent:
            with self._lock:
                if plan.sibling[node] not in self._waiting:
                    self._waiting[node] = value
                    return
                other = self._waiting.pop(plan.sibling[node])
            left, right = (value, other) if node in plan.lefts else (other, value)
            node = plan.parent[node]
            if self._close is not None and node not in plan.parent:
                self._close(plan.partials.index(node), left, right)
                return
            value = self._add(left, right)
        if self._close is not None:
            self._close(plan.partials.index(node), value, None)
        else:
            self._waiting[node] = value

    def take_partials(self) -> list[T]:
        """Remove and return the partial sums; the values of all shards must have been put."""
        return [*map(self._waiting.pop, self.plan.partials)]


def values_at_once(plan: TreePlan, runs: Sequence[Sequence[int]]) -> int:
    """Return how many values a `TreeSum` of a plan has at most, those in progress too.

    Each lane computes one of `runs` in order, and all lanes have one pace. A shard accumulates onto
    its left sibling where that is there; else it has a value of its own. One lane with all of V
    shards, a power of two above 1, has log2(V).
    """
    tree = TreeSum[int](plan, operator.add)
    most = 0
    for turn in itertools.zip_longest(*runs):
        claims = [tree.claim(shard, bool) for shard in turn if shard is not None]
        most = max(most, tree.waiting + len(claims))
        for node, left in claims:
            tree.put(node, 1 + (left or 0))
    return most
