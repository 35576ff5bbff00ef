"""When a shard was in which stage: timed by the host, or, on accelerators, by events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from evenstep.devices import accelerator
from evenstep.stages.turns import Place


class Visit(NamedTuple):
    """A stretch of time in which a stage's device computed a shard.

    Attributes:
        place: the stage, and whether it was the backward pass.
        began_s, ended_s: times of `time.perf_counter`.
    """

    place: Place
    began_s: float
    ended_s: float


class Visits:
    """The visits of one shard, on CPUs, where code has run when it returns.

    Args:
        note: called with every visit, at its end.
    """

    def __init__(self, note: Callable[[Visit], object]) -> None:
        self._note = note
        self._began_s: float | None = None  # None between two visits

    def begin(self, place: Place) -> None:
        """Begin a visit."""
        self._began_s = time.perf_counter()

    def end(self, place: Place) -> None:
        """End the visit that was begun, if one was."""
        if self._began_s is not None:
            self._note(Visit(place, self._began_s, time.perf_counter()))
            self._began_s = None

    def close(self) -> None:
        """Note the visits that were not noted yet: the shard has ended."""

    @property
    def working_s(self) -> float:
        """The seconds since the visit began; 0 between two visits."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.perf_counter() - began_s

    def unfinished(self, now: Place) -> Place:
        """Return where the shard is computed, given the place where the code is."""
        return now


class LaunchedVisits(Visits):
    """The visits of a shard whose kernels run later than they are launched.

    A moment is recorded on a stage's device at both ends of a visit, and one on every device when
    the shard begins: the kernels of the shard before have run, so the host knows when that was.

    Args:
        note: called with every visit when the shard has ended.
        devices: the accelerator of each stage.
    """

    def __init__(self, note: Callable[[Visit], object], devices: Sequence[torch.device]) -> None:
        super().__init__(note)
        self._devices = devices
        self._moments: list[tuple[Place, Any, Any]] = []
        self._opening: list[Any] = []
        self._began: Any = None

    def begin(self, place: Place) -> None:
        """Begin a visit."""
        if not self._opening:
            self._began_s = time.perf_counter()
            self._opening = [*map(accelerator.moment_here, self._devices)]
        self._began = accelerator.moment_here(self._devices[place.stage])

    def end(self, place: Place) -> None:
        """End the visit that was begun, if one was."""
        if self._began is not None:
            ended = accelerator.moment_here(self._devices[place.stage])
            self._moments.append((place, self._began, ended))
            self._began = None

    def close(self) -> None:
        """Note all visits whose kernels have run. The event behind the last one may be yet to."""
        opened_s, self._began_s = self._began_s, None
        if opened_s is None:
            return
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            for place, began, ended in self._moments:
                opening = self._opening[place.stage]
                if began.query():
                    began_s = opened_s + accelerator.seconds_between(opening, began)
                    ended_s = time.perf_counter()
                    if ended.query():
                        ended_s = opened_s + accelerator.seconds_between(opening, ended)
                    self._note(Visit(place, began_s, ended_s))

    def unfinished(self, now: Place) -> Place:
        """Return the place of the first visit whose kernels haven't run; `now` if all have."""
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            for place, _, ended in [*self._moments]:
                if not ended.query():
                    return place
        return now
