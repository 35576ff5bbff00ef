"""Devices as values: places where shards are computed, named `cpu:0`, `cuda:1`, `cpu:2:own`.

A CPU device is a lane of its own with a fixed number of intra-op threads. `cpu:2:own` has memory
of its own, as a GPU has: it holds copies of the parameters instead of sharing them. It is the
stand-in that lets every machine test what a box of GPUs does.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from evenstep.errors import DeviceError


@dataclasses.dataclass(frozen=True)
class Device:
    """A place where shards are computed.

    Attributes:
        kind: "cpu" or "cuda".
        index: number of the GPU, or of the CPU device (a name only: lanes are not pinned).
        own_memory: whether a CPU device keeps copies of the parameters, as GPUs do.
        threads: intra-op threads that torch may use in the device's lane; part of the experiment.
    """

    kind: Literal["cpu", "cuda"]
    index: int
    own_memory: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        if self.index < 0 or self.threads < 1:
            raise DeviceError(
                f"got index {self.index} and {self.threads} threads: a device needs an index of "
                f"at least 0 and at least 1 thread"
            )

    @functools.cached_property
    def name(self) -> str:
        """The name that `parse_device` reads: `cpu:0`, `cuda:1`, `cpu:2:own`."""
        return f"{self.kind}:{self.index}" + (":own" if self.own_memory else "")

    @functools.cached_property
    def memory(self) -> str:
        """The memory that its tensors live in; devices with the same memory share parameters."""
        return "cpu" if self.kind == "cpu" and not self.own_memory else self.name

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let `tensor.to(device)` and `module.to(device)` take a device of ours."""
        plain = [one.torch_device if isinstance(one, Device) else one for one in args]
        return function(*plain, **(kwargs or {}))

    @functools.cached_property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)

    @property
    def model_name(self) -> str:
        """What the promise holds within: results are bit-identical on one device model."""
        return "cpu" if self.kind == "cpu" else torch.cuda.get_device_name(self.index)

    def __str__(self) -> str:
        return self.name


def parse_device(name: str, *, threads: int = 1) -> Device:
    """Read a device's name: `cpu`, `cpu:1`, `cpu:1:own`, `cuda`, `cuda:0` (no number means 0)."""
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?(:own)?", name.strip())
    if match is None or (match[1] == "cuda" and match[3]):
        raise DeviceError(
            f"got device {name.strip()!r}: write cpu:0, cpu:1, ..., cuda:0, cuda:1, ..., "
            f"a number of devices, or auto"
        )
    kind: Literal["cpu", "cuda"] = "cpu" if match[1] == "cpu" else "cuda"
    return Device(kind, int(match[2] or 0), own_memory=bool(match[3]), threads=threads)
