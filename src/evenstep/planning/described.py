"""What a plan is made from: the work of a step, the machines, and how they divide the work.

All times are in seconds, all sizes in bytes. Nothing here knows torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Literal, TypeAlias

from evenstep.errors import InputError

Divide: TypeAlias = Literal["data", "owners", "stages", "slices"]
Exchange: TypeAlias = Literal["canonical", "ring", "sharded"]

BUCKET_NBYTES = 4 << 20
"""The size of the pieces in which evenstep exchanges gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One training step, as it was measured on one device.

    Attributes:
        name: what is trained.
        examples: the examples of a batch, over all shards.
        shard_s: the measured seconds of some shards, of which a batch has `shards`.
        shards: V, the number of shards of a batch.
        fixed_s: the part of a shard's seconds that does not depend on its number of examples.
        update_s: the seconds of the loss, the division and the optimizer.
        rest_s: the seconds of a step beside its shards, its update and its data.
        load_s: the seconds in which the loader makes a batch.
        gradient_nbytes: the gradients that are exchanged: of the parameters that are trained.
        state_nbytes: the optimizer's state.
        activation_nbytes: what one shard keeps for its backward pass; None if it is not known.
        cut_nbytes: the activations of a shard that pass from a stage to the next.
        forward_share: the share of a shard's seconds in its forward pass.
        slices: S, into how many slices layers are cut; 0 if none is.
        sliced_s: the seconds of a shard in which slices are computed.
        meetings: how often the devices that compute slices of a shard wait for each other.
        device: the kind of device that was measured, "cpu" or a kind of GPU.
        lacks: what nobody measured of it, in words.
    """

    name: str
    examples: int
    shard_s: tuple[float, ...]
    shards: int
    fixed_s: float = 0.0
    update_s: float = 0.0
    rest_s: float = 0.0
    load_s: float = 0.0
    gradient_nbytes: int = 0
    state_nbytes: int = 0
    activation_nbytes: int | None = None
    cut_nbytes: int = 0
    forward_share: float = 1 / 3
    slices: int = 0
    sliced_s: float = 0.0
    meetings: int = 0
    device: str = "cpu"
    lacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        times = (*self.shard_s, self.fixed_s, self.update_s, self.rest_s, self.load_s)
        times += (self.sliced_s,)
        if not self.shard_s or self.examples < 1 or self.shards < 1:
            raise InputError(
                f"got {len(self.shard_s)} times of shards, {self.examples} examples and "
                f"{self.shards} shards: a plan needs at least one of each"
            )
        if not all(0 <= one < math.inf for one in times) or not self.usual_s:
            raise InputError("a plan needs times that are finite, and shards that take time")

    @property
    def usual_s(self) -> float:
        """The median seconds of a shard."""
        return statistics.median(self.shard_s)

    def resized(self, *, shards: int | None = None, examples: int | None = None) -> Work:
        """Return the same work with a different V or batch.

        A shard's time is its fixed part, and a part in proportion to its examples.
        """
        shards, examples = shards or self.shards, examples or self.examples
        if (shards, examples) == (self.shards, self.examples):
            return self
        ratio = (examples / shards) / (self.examples / self.shards)
        held, load_s = self.activation_nbytes, self.load_s * examples / self.examples
        fixed_s = min(self.fixed_s, 0.9 * self.usual_s)
        return dataclasses.replace(
            self,
            shards=shards,
            examples=examples,
            load_s=load_s,
            shard_s=tuple(max(0.0, one - fixed_s) * ratio + fixed_s for one in self.shard_s),
            activation_nbytes=None if held is None else math.ceil(held * ratio),
            cut_nbytes=math.ceil(self.cut_nbytes * ratio),
            sliced_s=self.sliced_s * ratio,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A connection.

    Attributes:
        bytes_per_s: what passes in a second in one direction.
        latency_s: how long a message takes from one end to the other.
        message_s: the processor's time for each message.
        shared: whether all machines share these bytes a second, as of one cable or one uplink;
            otherwise each machine has them for itself, in each direction.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    message_s: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        if not (
            self.bytes_per_s > 0 and all(0 <= s < 60 for s in (self.latency_s, self.message_s))
        ):
            raise InputError(
                f"got a network of {self.bytes_per_s:g} bytes/s and {self.latency_s:g} s of "
                f"latency: give more than 0 bytes/s, and less than 60 s"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What was measured of a machine, or is assumed; all machines of a plan are alike.

    Attributes:
        devices: the devices of one machine.
        slowdown: how many times longer a shard takes while 1, 2, ... devices of one process
            compute; with more devices, the last number holds.
        process_slowdown: the same for devices of different processes of the machine.
        copied_bytes_per_s: what a process copies in a second, while all others do.
        memory_nbytes: the memory of a machine, or of each device that has its own; None if it is
            not known.
        has_own_memory: whether each device has memory of its own, as GPUs do.
        local: what connects processes of one machine, or devices with memory of their own.
        network: what connects machines.
        shared_s: how long processes of one machine take to meet in shared memory.
        meeting_s: how long a device takes to let another compute slices, and to get them back.
        step_spread: the standard deviation of a device's speed from step to step, over its mean,
            beside the spread of the measured shards.
    """

    devices: int = 1
    slowdown: tuple[float, ...] = (1.0,)
    process_slowdown: tuple[float, ...] = (1.0,)
    copied_bytes_per_s: float = math.inf
    memory_nbytes: int | None = None
    has_own_memory: bool = False
    local: Link = Link()
    network: Link = Link()
    shared_s: float = 0.0
    meeting_s: float = 0.0
    step_spread: float = 0.0

    def slowed(self, busy: int, *, by_threads: bool) -> float:
        """Return how many times longer a shard takes while `busy` devices compute."""
        found = self.slowdown if by_threads else self.process_slowdown
        return found[min(max(busy, 1), len(found)) - 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A layout: where a step is computed.

    Attributes:
        devices: all devices.
        per_machine: the devices of a machine.
        per_process: the devices of a process.
        divide: what is divided besides the batch.
        stages: the number of stages, for "stages".
        exchange: how gradients are added up over processes: evenstep's canonical sum; or, to
            compare with other libraries, a ring all-reduce, or the sharded parameters of FSDP.
        sockets: whether processes of one machine use sockets instead of shared memory.
        speeds: the speed of each device over that of the measured one; empty for 1.
        steals: whether idle devices take shards of others.
        in_flight: the number of steps in flight.
    """

    devices: int = 1
    per_machine: int = 1
    per_process: int = 1
    divide: Divide = "data"
    stages: int = 1
    exchange: Exchange = "canonical"
    sockets: bool = False
    speeds: tuple[float, ...] = ()
    steals: bool = True
    in_flight: int = 1

    def __post_init__(self) -> None:
        if min(self.devices, self.per_machine, self.per_process, self.in_flight) < 1:
            raise InputError("got a layout with no device: give at least 1 of everything")
        if self.per_process > self.per_machine:
            raise InputError(
                f"got {self.per_process} devices of a process on machines of {self.per_machine}: "
                f"a process is on one machine"
            )
        if self.divide == "stages" and self.per_process % self.stages:
            raise InputError(
                f"got {self.stages} stages and {self.per_process} devices of a process: the stages "
                f"of a network lie on devices of one process, so give a multiple of {self.stages}"
            )
        if self.divide == "slices" and self.in_flight > 1:
            raise InputError(
                f"got slices and {self.in_flight} steps in flight: devices that compute slices "
                f"together have one step in flight"
            )
        if self.speeds and (len(self.speeds) != self.devices or min(self.speeds) <= 0):
            raise InputError(
                f"got {len(self.speeds)} speeds for {self.devices} devices: give each device one, "
                f"above 0"
            )

    def speed(self, device: int) -> float:
        """Return the speed of a device over that of the measured one."""
        return self.speeds[device] if self.speeds else 1.0

    @property
    def machines(self) -> int:
        """The number of machines."""
        return math.ceil(self.devices / self.per_machine)

    @property
    def processes(self) -> tuple[range, ...]:
        """The devices of each process."""
        found = []
        for first in range(0, self.devices, self.per_machine):
            end = min(first + self.per_machine, self.devices)
            starts = range(first, end, self.per_process)
            found += [range(one, min(one + self.per_process, end)) for one in starts]
        return tuple(found)

    def machine_of(self, device: int) -> int:
        """Return the number of a device's machine."""
        return device // self.per_machine
