"""Who waits for whom: a pure record of tasks that read and write, without threads or torch.

A task waits for the tasks whose results it takes, and, for each place of mutable state that it
names, as in a sequential run: a reader for the last writer (read after write), a writer for the
last writer (write after write) and for every reader since (write after read). That is the rule of
MXNet's ThreadedEngine ("Dependency Engine for Deep Learning", its versioned queues of reads and
writes), kept as edges between tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar


class Place:
    """Mutable state that tasks read and write; who is still at it.

    Attributes:
        writer: the last task to write it, while that has not ended.
        readers: tasks since then that read it and have not ended.
        cause: the failure that left it undefined; None if it is sound.
    """

    __slots__ = ("cause", "readers", "writer")

    def __init__(self) -> None:
        self.writer: Node | None = None
        self.readers: set[Node] = set()
        self.cause: Node | None = None


class Node:
    """A task, as far as its order goes.

    Attributes:
        number: its place in the order of submission.
        missing: how many ends it still waits for.
        takers: tasks that wait for its end and need what it made: they fail if it fails.
        followers: tasks that wait for its end and no more.
        reads, writes: the places it reads only, and those it writes.
        ended: whether it has run, or will never run.
        cause: the task whose failure it suffers from (itself, if it failed); of several, the first.
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
        """Note that a failure reaches this task; of several, the first submitted counts."""
        if cause is not None and (self.cause is None or cause.number < self.cause.number):
            self.cause = cause


N = TypeVar("N", bound=Node)


class Graph(Generic[N]):
    """The tasks that have not ended.

    Attributes:
        unfinished: how many there are.
    """

    def __init__(self) -> None:
        self.unfinished = 0
        self._submitted = 0

    def add(
        self,
        node: N,
        inputs: Iterable[Node] = (),
        reads: Sequence[Place] = (),
        writes: Sequence[Place] = (),
    ) -> list[N]:
        """Add a task after all those added before it.

        Args:
            node: a new one.
            inputs: the tasks whose results it takes.
            reads: places it reads.
            writes: places it writes (and may read).

        Returns:
            [node] if it need not wait, else [].
        """
        node.number = self._submitted
        self._submitted += 1
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
        """End a task that waits for nothing; return those that wait for nothing now, in order.

        Those with a `cause` must not run: they are to be ended at once, as they are.
        """
        if failed:
            node.cause = node
        node.ended = True
        self.unfinished -= 1
        cause = node.cause
        for place in node.writes:
            if place.writer is node:
                place.cause = cause  # first: who finds no writer may look at it at once
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
