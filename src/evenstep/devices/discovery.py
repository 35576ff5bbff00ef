"""Which devices there are, how many cores may be used, and what to tell about a choice of them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from evenstep.devices.device import Device, parse_device
from evenstep.errors import DeviceError

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
