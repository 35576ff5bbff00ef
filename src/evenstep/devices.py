"""Devices as values: places where shards are computed, named `cpu:0`, `cuda:1`, `cpu:2:own`.

A CPU device is a lane of its own with a fixed number of intra-op threads. `cpu:2:own` has memory
of its own, as a GPU has: it holds copies of the parameters instead of sharing them. It is the
stand-in that lets every machine test what a box of GPUs does.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

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

    @property
    def name(self) -> str:
        """The name that `parse_device` reads: `cpu:0`, `cuda:1`, `cpu:2:own`."""
        return f"{self.kind}:{self.index}" + (":own" if self.own_memory else "")

    @property
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

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)

    @property
    def model_name(self) -> str:
        """What the promise holds within: results are bit-identical on one device model."""
        return "cpu" if self.kind == "cpu" else torch.cuda.get_device_name(self.index)

    def __str__(self) -> str:
        return self.name


Devices: TypeAlias = "str | int | Sequence[str | Device | torch.device]"
"""What a user may say: "auto", a number, "cpu:0,cpu:1", or a list of names or Devices."""


def find_devices(
    wanted: Devices = "auto", *, threads: int = 1, share: tuple[int, int] = (0, 1)
) -> tuple[Device, ...]:
    """Return the devices that `wanted` names, after checking that they exist.

    Args:
        wanted: "auto" (all GPUs, else one CPU device for each usable core), a number of devices
            (GPUs where there are any, else CPU devices), or names. A GPU may be named twice: two
            lanes on it.
        threads: intra-op threads for each device that `wanted` doesn't give as a `Device`.
        share: (i, n): this is process i of n on this machine, and shares its devices with them,
            unless `wanted` names them.

    Raises:
        DeviceError: an unknown name, no device at all, or a GPU that isn't there.
    """
    if isinstance(wanted, str) and re.fullmatch(r"\s*-?\d+\s*", wanted):
        wanted = int(wanted)
    if wanted == "auto":
        found = try_all_gpus(threads=threads) if share == (0, 1) else _shared(threads, share)
    elif isinstance(wanted, int):
        found = _numbered(wanted, threads, share[0])
    else:
        names = wanted.split(",") if isinstance(wanted, str) else wanted
        found = tuple(
            name if isinstance(name, Device) else parse_device(str(name), threads=threads)
            for name in names
        )
    _check(found)
    return found


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


def try_gpu(index: int = 0) -> Device:
    """Return GPU `index` if it is there, else the CPU device `cpu:0`."""
    return Device("cuda", index) if index < gpu_count() else Device("cpu", 0)


def try_all_gpus(*, threads: int = 1) -> tuple[Device, ...]:
    """Return every GPU, or without one a CPU device for each core that this process may use."""
    if gpu_count():
        return tuple(Device("cuda", index, threads=threads) for index in range(gpu_count()))
    count = max(1, usable_cores() // threads)
    return tuple(Device("cpu", index, threads=threads) for index in range(count))


def gpu_count() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def usable_cores() -> int:
    """Return the number of cores that this process may use: affinity and cgroup quota count."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cgroup_quota_cores()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cgroup_quota_cores(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the tightest CPU quota of this process's control groups in cores; None without one.

    Reads `cpu.max` of the group and of each of its parents (cgroup v2), or `cpu.cfs_quota_us` and
    `cpu.cfs_period_us` (v1), as the Linux kernel's documentation of control groups lays down.
    """
    quotas = [quota for group in _cgroups(root, proc) for quota in _quotas(group)]
    return min(quotas, default=None)


def carry(
    tensor: torch.Tensor, device: Device, memory_format: torch.memory_format = torch.preserve_format
) -> torch.Tensor:
    """Return a copy of `tensor` in the memory of `device`, in an allocation of its own.

    To a GPU it goes through pinned memory, in the order of the calling thread's stream.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    target = device.torch_device
    if device.kind == "cuda" and not tensor.is_cuda:
        pinned = tensor.pin_memory()
        return pinned.to(target, copy=True, memory_format=memory_format, non_blocking=True)
    return tensor.to(target, copy=True, memory_format=memory_format)


def layout_notes(devices: Sequence[Device], shards: int) -> list[str]:
    """Return a line for each thing about `devices` that costs time or weakens the promise."""
    notes = []
    lanes = sum(device.threads for device in devices if device.kind == "cpu")
    if lanes > usable_cores():
        notes.append(
            f"{lanes} threads of CPU devices share {usable_cores()} cores: the result is the "
            f"same, the time is that of {usable_cores()}"
        )
    if len(devices) > shards:
        notes.append(
            f"{shards} shards keep {shards} of {len(devices)} devices busy: "
            f"--shards {len(devices)} uses them all, and is another experiment"
        )
    models = sorted({device.model_name for device in devices})
    if len(models) > 1 or len({device.threads for device in devices}) > 1:
        notes.append(
            f"devices of different kinds ({', '.join(models)}) or thread counts: results are "
            f"equal within rounding, not bit for bit"
        )
    return notes


@contextmanager
def intra_op_threads(threads: int) -> Iterator[None]:
    """Let torch use `threads` threads in the calling thread, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic_kernels(devices: Sequence[Device]) -> Iterator[None]:
    """On CUDA devices, keep torch to kernels whose bits don't depend on timing.

    Switches off cuDNN's autotuning and asks for deterministic algorithms; puts both back.
    """
    if all(device.kind == "cpu" for device in devices):
        yield
        return
    benchmark = torch.backends.cudnn.benchmark
    algorithms = torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(algorithms)


def _shared(threads: int, share: tuple[int, int]) -> tuple[Device, ...]:
    """Return this process's share of all devices; at least one."""
    rank, processes = share
    if gpu_count():
        found = try_all_gpus(threads=threads)
        return found[rank::processes] or found[rank % len(found) :][:1]
    count = max(1, usable_cores() // (threads * processes))
    return tuple(Device("cpu", index, threads=threads) for index in range(count))


def _numbered(count: int, threads: int, rank: int) -> tuple[Device, ...]:
    if count < 1:
        raise DeviceError(f"got {count} devices: at least 1 is needed")
    if gpu_count():
        first = rank * count
        return tuple(Device("cuda", first + index, threads=threads) for index in range(count))
    return tuple(Device("cpu", index, threads=threads) for index in range(count))


def _check(devices: Sequence[Device]) -> None:
    if not devices:
        raise DeviceError("got an empty list of devices: name at least one, or say auto")
    gpus = gpu_count()
    for device in devices:
        if device.kind == "cuda" and device.index >= gpus:
            raise DeviceError(
                f"got {device}, but torch sees {gpus} GPU{'s' * (gpus != 1)} here: use "
                + ("", "cuda:0, or ", f"cuda:0 to cuda:{gpus - 1}, or ")[min(gpus, 2)]
                + "CPU devices (cpu:0, cpu:1, ...)"
            )
    names = [device.name for device in devices if device.kind == "cpu"]
    for name in names:
        if names.count(name) > 1:
            raise DeviceError(f"got {name} twice: give each CPU device a number of its own")


def _cgroups(root: Path, proc: Path) -> list[Path]:
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        here = base / path.lstrip("/")
        groups += [here, *(parent for parent in here.parents if parent.is_relative_to(base))]
    return groups


def _quotas(group: Path) -> list[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]
