"""Who computes the slices of a layer: the calling thread, or several devices at the same time."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol, TypeAlias

import torch

from evenstep.collectives import even_bounds
from evenstep.devices import Device, carry
from evenstep.engine import streams
from evenstep.engine.interrupts import POLL_S
from evenstep.engine.task import is_device_failure
from evenstep.errors import EvenstepError


class KeptPart(NamedTuple):
    """A part of a parameter, which a device with memory of its own keeps during a step.

    Attributes:
        key: tells it from every other part of a parameter.
        tensor: its values, in the memory of the model.
    """

    key: Hashable
    tensor: torch.Tensor


Argument: TypeAlias = "torch.Tensor | KeptPart | None"
Result: TypeAlias = "tuple[torch.Tensor | None, ...]"

SliceFunction: TypeAlias = "Callable[..., Result]"
"""Computes a slice from its number and the values of its arguments; it reads nothing else."""


class SliceRunner(Protocol):
    """Computes the slices of a layer."""

    def run(self, function: SliceFunction, arguments: Sequence[Sequence[Argument]]) -> list[Result]:
        """Return `function(slice, *arguments[slice])` for every slice, in their order."""


class OneByOne:
    """Computes slices one after another, in the calling thread."""

    def run(self, function: SliceFunction, arguments: Sequence[Sequence[Argument]]) -> list[Result]:
        """Return `function(slice, *arguments[slice])` for every slice."""
        return [
            function(number, *(one.tensor if isinstance(one, KeptPart) else one for one in given))
            for number, given in enumerate(arguments)
        ]


ONE_BY_ONE = OneByOne()

runner_here: ContextVar[SliceRunner] = ContextVar("slice runner", default=ONE_BY_ONE)
"""What computes the slices of layers that the calling thread calls."""


@dataclasses.dataclass
class Exchanged:
    """What devices have sent each other to compute slices together.

    Attributes:
        nbytes: bytes copied to devices with memory of their own, and back.
        waits: how often devices waited for each other.
        held: for each device with memory of its own, the bytes of its slices of the weights.
    """

    nbytes: int = 0
    waits: int = 0
    held: dict[str, int] = dataclasses.field(default_factory=dict)


class SlicingStoppedError(EvenstepError):
    """The step was dropped while its slices were computed."""


class SlicingDevices:
    """Devices that compute the slices of one shard at a time together, each in its lane.

    Slices are assigned to devices in contiguous runs whose lengths differ by at most one, always in
    the same way, so that a device with memory of its own needs only its slices of the weights. The
    lane of the first device computes everything between the sliced layers. `exchanged` counts what
    the devices send each other.

    Attributes:
        first: the lane of the first device.
    """

    def __init__(self, members: Mapping[int, Device], exchanged: Exchanged) -> None:
        self.first, *self._helpers = members
        self._members = members
        self._home = members[self.first]
        self._exchanged = exchanged
        self._inboxes: dict[int, queue.SimpleQueue[_Job | None]] = {
            lane: queue.SimpleQueue() for lane in self._helpers
        }
        self._memories = {
            lane: _Memory(members[lane], self._home)
            for lane in self._helpers
            if members[lane].memory != self._home.memory
        }
        self._is_stopped = False
        self._waits_for: _Job | None = None

    def run(self, function: SliceFunction, arguments: Sequence[Sequence[Argument]]) -> list[Result]:
        """Compute all slices, one run of them here; called in the first device's lane.

        Raises:
            SlicingStoppedError: the step was dropped.
        """
        runs = [range(*ends) for ends in even_bounds(len(arguments), len(self._members))]
        runs_of = dict(zip(self._helpers, runs[1:], strict=True))
        asked = [lane for lane, run in runs_of.items() if run]
        given = streams.given_from(self._home, arguments)
        job = _Job(function, given, runs_of, {*asked})
        if self._is_stopped:
            raise SlicingStoppedError
        for lane in asked:
            self._inboxes[lane].put(job)
        own = [(number, arguments[number]) for number in runs[0]]
        job.results.update({n: function(n, *map(_value_here, given)) for n, given in own})
        self._wait(job)
        for found in job.found:
            job.results.update(streams.taken(found, self._home))
        self._exchanged.waits += bool(asked)
        self._exchanged.nbytes += sum(job.nbytes.values())
        self._exchanged.held.update(job.held)
        for number in sorted(job.errors):
            raise job.errors[number]
        return [job.results[number] for number in range(len(arguments))]

    def help(self, lane: int) -> None:
        """Compute slices in the lane of another device than the shard's, until `stop`."""
        inbox, memory = self._inboxes[lane], self._memories.get(lane)
        with torch.no_grad():
            while (job := inbox.get()) is not None:
                self._compute(job, lane, memory)
                del job  # an idle lane must not keep a step's tensors alive

    def stop(self) -> None:
        """End the work: helpers return, and the shard gets an error instead of slices."""
        self._is_stopped = True
        for inbox in self._inboxes.values():
            inbox.put(None)
        job = self._waits_for
        if job is not None:
            job.is_done.set()

    def keeping(self, stuck: Sequence[int]) -> list[int]:
        """Return the lanes that a stuck shard waits for, or its own if it waits for none."""
        job = self._waits_for
        return sorted(job.missing) if stuck and job is not None and job.missing else [*stuck]

    def _compute(self, job: _Job, lane: int, memory: _Memory | None) -> None:
        number, found, device = -1, {}, self._members[lane]
        try:
            arguments = streams.taken(job.given, device)
            for number in job.runs[lane]:
                given = arguments[number]
                if memory is None:
                    found[number] = job.function(number, *map(_value_here, given))
                else:
                    result = job.function(number, *map(memory.receive, given))
                    found[number] = memory.send_back(result)
        except Exception as error:
            if is_device_failure(error):
                raise
            job.errors[number] = error  # raised in the first lane, for the user's traceback
        if memory is not None:
            memory.forget_received()
            job.nbytes[lane] = memory.take_nbytes()
            job.held[memory.device.name] = memory.held_nbytes
        job.found.append(streams.given_from(self._home, found))  # sent back to there
        job.end(lane)

    def _wait(self, job: _Job) -> None:
        self._waits_for = job
        while not job.is_done.wait(POLL_S) and not self._is_stopped:
            pass
        self._waits_for = None
        if job.missing:
            raise SlicingStoppedError


class _Job:
    """The slices of one call, handed to the lanes of several devices."""

    def __init__(
        self,
        function: SliceFunction,
        given: streams.Given,
        runs: Mapping[int, Sequence[int]],
        missing: set[int],
    ) -> None:
        self.function = function
        self.given = given  # the arguments of each slice
        self.runs = runs
        self.missing = missing
        self.results: dict[int, Result] = {}
        self.found: list[streams.Given] = []  # the results of each lane
        self.errors: dict[int, Exception] = {}
        self.nbytes: dict[int, int] = {}
        self.held: dict[str, int] = {}
        self.is_done = threading.Event()
        self._lock = threading.Lock()
        if not missing:
            self.is_done.set()

    def end(self, lane: int) -> None:
        """Note that a lane has computed its run."""
        with self._lock:
            self.missing.discard(lane)
            if not self.missing:
                self.is_done.set()


class _Memory:
    """The memory of a device that doesn't share the model's: what it holds, and what it was sent.

    Results go to the device `home`.

    Attributes:
        held_nbytes: bytes of the parts of parameters that it holds.
    """

    def __init__(self, device: Device, home: Device) -> None:
        self.device = device
        self.held_nbytes = 0
        self._home = home
        self._held: dict[Hashable, torch.Tensor] = {}
        self._received: dict[Hashable, torch.Tensor] = {}
        self._nbytes = 0

    def receive(self, argument: Argument) -> torch.Tensor | None:
        """Return an argument in this memory; it is sent once, and a part of a parameter is kept."""
        if argument is None:
            return None
        if isinstance(argument, KeptPart):
            key, tensor, known = argument.key, argument.tensor, self._held
        else:
            key, tensor, known = id(argument), argument, self._received
        if key not in known:
            known[key] = self._carry(tensor, self.device)
            self.held_nbytes += tensor.nbytes * (known is self._held)
        return known[key]

    def send_back(self, result: Result) -> Result:
        """Return a copy of a result in the memory of the model."""
        return tuple(one if one is None else self._carry(one, self._home) for one in result)

    def forget_received(self) -> None:
        """Free what was sent for one call only."""
        self._received.clear()

    def take_nbytes(self) -> int:
        """Return the bytes that were sent, in both directions, since the last call."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes

    def _carry(self, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        self._nbytes += tensor.nbytes
        return carry(tensor, device)


def _value_here(argument: Argument) -> torch.Tensor | None:
    return argument.tensor if isinstance(argument, KeptPart) else argument
