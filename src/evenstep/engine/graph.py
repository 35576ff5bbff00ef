"""The dependency graph: which tasks must wait for which others. No threads, no torch.

A task waits for the tasks whose results it takes. For each place of mutable state that it names, it
also waits as in a sequential run: a reader for the last writer (read after write), a writer for the
last writer (write after write) and for all readers since then (write after read). This is the rule
of MXNet's ThreadedEngine ("Dependency Engine for Deep Learning", its versioned queues of reads and
writes), recorded as edges between tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar


class Place:
    """Mutable state that tasks read and write, with the unfinished tasks that use it.

    Attributes:
        writer: the last task that writes it; None once that task has ended.
        readers: unfinished tasks that were submitted after `writer` and read the place.
        cause: the failed task that left the value undefined; None if the value is valid.
    """

    __slots__ = ("cause", "readers", "writer")

    def __init__(self) -> None:
        self.writer: Node | None = None
        self.readers: set[Node] = set()
        self.cause: Node | None = None


class Node:
    """A task as the graph sees it.

    Attributes:
        number: position in the order of submission, from 0; -1 before submission.
        missing: number of tasks that must end before this one can start.
        takers: tasks that wait for this one and need its result: they fail if it fails.
        followers: tasks that wait for this one but do not need its result.
        reads, writes: the places it only reads, and the places it writes.
        ended: whether it has run, or will never run.
        cause: the task whose failure reached this one (itself if it failed); the one submitted
            first if there are several.
    """

    __slots__ = (
        "cause", "ended", "followers", "missing", "number", "reads", "takers", "writes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.number = -1
        self.missing = 0
        self.takers: list[Any] = []
        self.followers: list[Any] = []
        self.reads: Sequence[Place] = ()
        self.writes: Sequence[Place] = ()
        self.ended = False
        self.cause: Node | None = None

    @property
    def was_submitted(self) -> bool:
        """Whether it was added to a graph."""
        return self.number >= 0

    def suffer(self, cause: Node | None) -> None:
        """Record that a failure reaches this task; of several causes, keep the first submitted."""
        if cause is not None and (self.cause is None or cause.number < self.cause.number):
            self.cause = cause


N = TypeVar("N", bound=Node)


class Graph(Generic[N]):
    """The tasks that have not ended.

    Args:
        first: the number of the first task.

    Attributes:
        unfinished: the number of tasks that have not ended.
        submitted: the number of the next task.
    """

    def __init__(self, first: int = 0) -> None:
        self.unfinished = 0
        self.submitted = first

    def add(
        self,
        node: N,
        inputs: Iterable[Node] = (),
        reads: Sequence[Place] = (),
        writes: Sequence[Place] = (),
    ) -> list[N]:
        """Add a task after all those added before it.

        Args:
            node: the task, not yet in any graph.
            inputs: the tasks whose results it needs.
            reads: places it reads.
            writes: places it writes (and may read).

        Returns:
            [node] if it can start at once, else [].
        """
        node.number = self.submitted
        self.submitted += 1
        self.unfinished += 1
        for source in inputs:
            _take(node, source)
        if writes:
            node.writes = writes = _distinct(writes)
            node.reads = reads = [place for place in reads if place not in writes]
            for place in writes:
                _take_place(node, place)
                node.missing += len(place.readers)
                for reader in place.readers:
                    reader.followers.append(node)
                place.writer = node
                if place.readers:
                    place.readers = set()
        if reads:
            node.reads = reads = _distinct(reads)
            for place in reads:
                _take_place(node, place)
                place.readers.add(node)
        return [] if node.missing else [node]

    def end(self, node: N, *, failed: bool = False) -> list[N]:
        """End a task that waits for nothing.

        Returns:
            The tasks that now wait for nothing, in the order of submission. Those with a `cause`
            must not run: the caller ends them at once.
        """
        if failed:
            node.cause = node
        node.ended = True
        self.unfinished -= 1
        cause = node.cause
        for place in node.writes:
            if place.writer is node:
                place.cause = cause  # before `writer`: a reader that finds no writer looks at it
                place.writer = None
        for place in node.reads:
            place.readers.discard(node)
        freed: list[N] = []
        for taker in node.takers:
            taker.suffer(cause)
            taker.missing -= 1
            if not taker.missing:
                freed.append(taker)
        for follower in node.followers:
            follower.missing -= 1
            if not follower.missing:
                freed.append(follower)
        node.takers, node.followers = [], []
        if len(freed) > 1:
            freed.sort(key=_number)
        return freed


def _distinct(places: Iterable[Place]) -> Sequence[Place]:
    found = tuple(places)
    return found if len(found) < 2 else tuple(dict.fromkeys(found))


def _number(node: Node) -> int:
    return node.number


def _take(node: Node, source: Node) -> None:
    if source.ended:
        node.suffer(source.cause)
    else:
        source.takers.append(node)
        node.missing += 1


def _take_place(node: Node, place: Place) -> None:
    if place.writer is not None:
        place.writer.takers.append(node)
        node.missing += 1
    else:
        node.suffer(place.cause)
