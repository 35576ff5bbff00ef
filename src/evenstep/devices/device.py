"""Devices as values: `cpu:0`, `cuda:1`, `cpu:2:own`.

A CPU device computes in a thread of its own with a fixed number of intra-op threads. `cpu:2:own`
has memory of its own: it holds copies of the parameters, as an accelerator does, instead of sharing
them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep.devices import accelerator
from evenstep.errors import DeviceError, shown
from evenstep.limits import MOST_THREADS

MOST_INDEX = 10**6 - 1
"""The largest number in a device's name."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A place where shards are computed.

    Attributes:
        kind: "cpu", or the type of an accelerator as torch names it: "cuda", "xpu", ...
        index: number of the accelerator, or of the CPU device (only a name: threads are not
            pinned).
        own_memory: whether a CPU device keeps copies of the parameters, as accelerators do.
        threads: number of intra-op threads on this device, at most 1,024; part of the experiment.
        name: the name that `parse_device` reads: `cpu:0`, `cuda:1`, `cpu:2:own`.
        memory: the memory that holds its tensors; devices with the same memory share parameters.
        torch_device: the `torch.device` that its tensors are on.
        is_accelerator: whether it is no CPU device: its kernels run later than they are launched.
    """

    kind: str
    index: int
    own_memory: bool = False
    threads: int = 1
    name: str = dataclasses.field(init=False, repr=False, compare=False)
    memory: str = dataclasses.field(init=False, repr=False, compare=False)
    torch_device: torch.device = dataclasses.field(init=False, repr=False, compare=False)
    is_accelerator: bool = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least, most in (("index", 0, MOST_INDEX), ("threads", 1, MOST_THREADS)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise DeviceError(
                    f"got {name}={shown(value)} of a device: give an integer from {least} to {most}"
                )
        name = f"{self.kind}:{self.index}" + (":own" if self.own_memory else "")
        is_cpu = self.kind == "cpu"
        derived = {
            "name": name,
            "memory": "cpu" if is_cpu and not self.own_memory else name,
            "torch_device": torch.device("cpu") if is_cpu else torch.device(self.kind, self.index),
            "is_accelerator": not is_cpu,
        }
        for field, value in derived.items():
            object.__setattr__(self, field, value)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Support `tensor.to(device)` and `torch.ones(3, device=device)`, like `torch.device`."""
        named = kwargs or {}
        if not any(isinstance(one, Device) for one in (*args, *named.values())):
            return NotImplemented  # a device in a list of tensors, for which torch has an error
        return function(
            *map(_in_torch, args), **{name: _in_torch(value) for name, value in named.items()}
        )

    @property
    def parts(self) -> tuple[Device, ...]:
        """The devices in whose memory its replica of the model lies: itself."""
        return (self,)

    @property
    def model_name(self) -> str:
        """The hardware model; results are bit-identical on devices of one model only."""
        return accelerator.model_name(self.torch_device) if self.is_accelerator else "cpu"

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class StagedDevice(Device):
    """An accelerator that computes one stage of the network; its replica lies on several.

    Attributes:
        stages: the device of each stage, which all are of one kind.
    """

    stages: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        memories = dict.fromkeys(device.memory for device in self.stages)
        object.__setattr__(self, "memory", "+".join(memories))

    @property
    def parts(self) -> tuple[Device, ...]:
        """The devices in whose memory its replica of the model lies, each once."""
        return tuple(dict.fromkeys(self.stages))


def in_stages(devices: Sequence[Device], count: int) -> list[Device]:
    """Return devices that compute the stages of one replica, `count` after another, in turn.

    CPU devices stay as they are: they can read each other's memory.
    """
    if count == 1:
        return [*devices]
    found: list[Device] = []
    for number, one in enumerate(devices):
        first = number - number % count
        stages = tuple(devices[first : first + count])
        if one.is_accelerator:
            one = StagedDevice(one.kind, one.index, one.own_memory, one.threads, stages)
        found.append(one)
    return found


def _in_torch(value: Any) -> Any:
    """Return an argument of a function of torch, with the `torch.device` in a device's place."""
    return value.torch_device if isinstance(value, Device) else value


def as_device(device: object, *, threads: int = 1) -> Device:
    """Return the `Device` for a name, a `torch.device`, or a `Device` (which is returned as it is).

    Args:
        device: a `Device`, a `torch.device`, or a name that `parse_device` reads.
        threads: intra-op threads, unless `device` is a `Device`.

    Raises:
        DeviceError: a different type, or an unknown name.
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, str | torch.device):
        return parse_device(str(device), threads=threads)
    raise DeviceError(
        f"got a device of type {type(device).__name__}: give a name such as cpu:1 or cuda:0, a "
        f"torch.device, or an evenstep.Device"
    )


def parse_device(name: str, *, threads: int = 1) -> Device:
    """Parse a device name: `cpu`, `cpu:1`, `cpu:1:own`, `cuda`, `cuda:0` (no number means 0).

    Instead of `cuda`, it may be any type of device that torch knows.
    """
    match = re.fullmatch(r"([a-z][a-z0-9_]{0,30})(?::(\d{1,6}))?(:own)?", name.strip())
    if match is None or not _is_a_kind(match[1]) or (match[1] != "cpu" and match[3]):
        raise DeviceError(
            f"got device {shown(name.strip())}: write cpu:0, cpu:1, ..., cuda:0, cuda:1, ..., "
            f"a number of devices, or auto"
        )
    return Device(match[1], int(match[2] or 0), own_memory=bool(match[3]), threads=threads)


def _is_a_kind(name: str) -> bool:
    """Whether torch knows a type of device of this name, on which it can compute."""
    try:
        torch.get_device_module(name)
    except RuntimeError:
        return False
    return True
