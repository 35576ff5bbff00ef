"""A clock with events, and links that carry one message after another."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from evenstep.planning.described import Link


class Events:
    """The events of a simulation, in the order of their times.

    Attributes:
        now_s: the time of the event that happens now.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._count = itertools.count()  # events of one time happen in the order of their making
        self._heap: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, when_s: float, do: Callable[[], object]) -> None:
        """Let something happen at a time; a time that has passed counts as now."""
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._count), do))

    def run(self) -> None:
        """Let everything happen."""
        while self._heap:
            self.now_s, _, do = heapq.heappop(self._heap)
            do()


class Wire:
    """One end of a link, which sends one message after another."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_s = 0.0

    def send(self, now_s: float, nbytes: float, messages: int = 1) -> float:
        """Send bytes as some messages; return when the last one arrives."""
        took_s = nbytes / self._link.bytes_per_s + messages * self._link.message_s
        self._free_s = max(now_s, self._free_s) + took_s
        return self._free_s + self._link.latency_s


class Gathering:
    """Calls `then` once `count` parts have arrived."""

    def __init__(self, count: int, then: Callable[[], object]) -> None:
        self._missing, self._then = count, then

    def arrive(self) -> None:
        """Count one more part."""
        self._missing -= 1
        if not self._missing:
            self._then()
