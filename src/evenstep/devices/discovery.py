"""Finds devices: the GPUs and cores that this process may use, and the devices that users name."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from evenstep.devices import accelerator
from evenstep.devices.device import Device, as_device
from evenstep.errors import DeviceError, counted, hides_own_frames, shown
from evenstep.limits import MOST_DEVICES, MOST_THREADS

Devices: TypeAlias = "int | str | torch.device | Device | Sequence[str | torch.device | Device]"
"""The types that `find_devices` accepts."""

WITHIN_ROUNDING = "results are equal within rounding, not bit for bit"
"""What is said of results that devices or processes of different kinds have a part in."""


@hides_own_frames
def find_devices(
    wanted: Devices = "auto", *, threads: int = 1, share: tuple[int, int] = (0, 1)
) -> tuple[Device, ...]:
    """Return the devices that `wanted` describes, after checking that they exist.

        find_devices("auto"), find_devices(2), find_devices("cpu:1")
        find_devices(torch.device("cuda:0")), find_devices(["cuda:0", Device("cpu", 0, threads=2)])

    Args:
        wanted: one of

            * "auto": all GPUs; without a GPU, one CPU device for each usable core;
            * a number of devices, 2 or "2", at most 1,024: GPUs if there are any, otherwise CPU
              devices;
            * one device: a name, a `torch.device` or a `Device`;
            * several devices: a sequence of these, or "cpu:0,cpu:1". A GPU may be listed twice:
              then two lanes compute on it.
        threads: intra-op threads of each device that is not given as a `Device`.
        share: (i, n): this is process i of the n processes that share the machine's devices if
            `wanted` is "auto" or a number.

    Raises:
        DeviceError: a wrong type, an unknown name, no device, or a GPU that does not exist.
    """
    if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise DeviceError(f"got threads={shown(threads)}: give an integer from 1 to {MOST_THREADS}")
    if isinstance(wanted, str) and re.fullmatch(r"\s*-?\d{1,9}\s*", wanted):
        wanted = int(wanted)
    if wanted == "auto":
        found = try_all_gpus(threads=threads) if share == (0, 1) else _shared(threads, share)
    elif isinstance(wanted, int) and not isinstance(wanted, bool):
        found = _numbered(wanted, threads, share[0])
    else:
        some = itertools.islice(_listed(wanted), MOST_DEVICES + 1)
        found = tuple(as_device(device, threads=threads) for device in some)
    _check(found)
    return found


def try_gpu(index: int = 0) -> Device:
    """Return GPU `index` if it exists, otherwise the CPU device `cpu:0`."""
    return _gpu(index) if index < gpu_count() else Device("cpu", 0)


def try_all_gpus(*, threads: int = 1) -> tuple[Device, ...]:
    """Return all GPUs; without a GPU, one CPU device for each core that this process may use."""
    if gpu_count():
        return tuple(_gpu(index, threads) for index in range(gpu_count()))
    count = min(max(1, usable_cores() // threads), MOST_DEVICES)
    return tuple(Device("cpu", index, threads=threads) for index in range(count))


def gpu_count() -> int:
    """Return the number of GPUs, or other accelerators, that torch can use."""
    return accelerator.count_here()


def usable_cores() -> int:
    """Return the number of cores that affinity and cgroup quota let this process use."""
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cgroup_quota_cores()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cgroup_quota_cores(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the lowest CPU quota of this process's control groups, in cores; None without one.

    Reads `cpu.max` of the group and of each of its parents (cgroup v2), or `cpu.cfs_quota_us` and
    `cpu.cfs_period_us` (v1); see the Linux kernel's documentation of control groups.
    """
    quotas = [quota for group in _cgroups(root, proc) for quota in _quotas(group)]
    return min(quotas, default=None)


def free_memory_nbytes(
    device: torch.device, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> int | None:
    """Return how much memory a program may still take on a device; None if nothing says it.

    Of a CPU it is what Linux can give (`MemAvailable`), or what control groups still allow, if that
    is less; on other systems the machine's whole memory.
    """
    if device.type != "cpu":
        return accelerator.memory_nbytes(device)[0]
    found = []
    try:
        lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        with contextlib.suppress(AttributeError, ValueError):  # not on Windows
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    groups = _cgroups(root, proc / "self" / "cgroup", "memory")
    found += [free for group in groups for free in _free_in(group)]
    return min(found, default=None)


def layout_notes(devices: Sequence[Device], shards: int) -> list[str]:
    """Return a line for each property of `devices` that costs time or weakens reproducibility."""
    notes = []
    lanes = sum(device.threads for device in devices if not device.is_accelerator)
    if lanes > usable_cores():
        notes.append(
            f"{lanes} threads of CPU devices share {usable_cores()} cores: the result is the "
            f"same, but no faster than with {usable_cores()}"
        )
    if len(devices) > shards:
        notes.append(
            f"{shards} shards keep {shards} of {len(devices)} devices busy: "
            f"shards={len(devices)} uses them all (and is a different experiment)"
        )
    return notes + rounding_notes(devices)


def rounding_notes(devices: Sequence[Device]) -> list[str]:
    """Return a line if results on `devices` are not those of other devices, bit for bit."""
    models = sorted({device.model_name for device in devices})
    if len(models) > 1 or len({device.threads for device in devices}) > 1:
        return [
            f"devices of different kinds ({', '.join(models)}) or thread counts: {WITHIN_ROUNDING}"
        ]
    return []


def _shared(threads: int, share: tuple[int, int]) -> tuple[Device, ...]:
    """Return this process's share of all devices, at least one."""
    rank, processes = share
    if gpu_count():
        found = try_all_gpus(threads=threads)
        return found[rank::processes] or found[rank % len(found) :][:1]
    count = min(max(1, usable_cores() // (threads * processes)), MOST_DEVICES)
    return tuple(Device("cpu", index, threads=threads) for index in range(count))


def _listed(wanted: object) -> Iterable[object]:
    if isinstance(wanted, str):
        return wanted.split(",")
    if isinstance(wanted, Device | torch.device):
        return [wanted]
    if isinstance(wanted, Iterable):
        return wanted
    raise DeviceError(
        f"got devices of type {type(wanted).__name__}: give 'auto', a number of devices, a name "
        f"such as cpu:1 or cuda:0, a torch.device, an evenstep.Device, or a list of these"
    )


def _numbered(count: int, threads: int, rank: int) -> tuple[Device, ...]:
    if count < 1:
        raise DeviceError(f"got {shown(count)} devices: at least 1 is needed")
    if count > MOST_DEVICES:
        raise _too_many(count)
    if gpu_count():
        first = rank * count
        return tuple(_gpu(first + index, threads) for index in range(count))
    return tuple(Device("cpu", index, threads=threads) for index in range(count))


def _check(devices: Sequence[Device]) -> None:
    if not devices:
        raise DeviceError("got an empty list of devices: name at least one, or give 'auto'")
    if len(devices) > MOST_DEVICES:
        raise _too_many(len(devices))
    threads = sum(device.threads for device in devices if not device.is_accelerator)
    if threads > MOST_THREADS and threads > usable_cores():
        raise DeviceError(
            f"got {len(devices)} devices with {threads} intra-op threads in all: a process may "
            f"have at most {max(MOST_THREADS, usable_cores())}, so use fewer devices, or fewer "
            f"threads of each"
        )
    _check_gpus([device for device in devices if device.is_accelerator])
    names = Counter(device.name for device in devices if not device.is_accelerator)
    for name, times in names.items():
        if times > 1:
            raise DeviceError(f"got {name} twice: give each CPU device a number of its own")


def _check_gpus(devices: Sequence[Device]) -> None:
    kind, gpus = accelerator.kind_here(), gpu_count()
    of_kind = [device for device in devices if device.kind == kind]
    if kind is not None and of_kind:
        accelerator.ask_for_deterministic_products(kind)
        present = [device.torch_device for device in of_kind if device.index < gpus]
        accelerator.refuse_incomplete(kind, present)
    for device in devices:
        if device.kind == "mps":
            raise DeviceError(
                f"got {device}: evenstep does not support Apple's MPS; use CPU devices (cpu:0, "
                f"cpu:1, ...)"
            )
        if device.kind != kind or device.index >= gpus:
            raise DeviceError(
                f"got {device}, but torch sees {counted(gpus, 'GPU')} here: use "
                + ("", f"{kind}:0, or ", f"{kind}:0 to {kind}:{gpus - 1}, or ")[min(gpus, 2)]
                + "CPU devices (cpu:0, cpu:1, ...)"
            )


def _gpu(index: int, threads: int = 1) -> Device:
    return Device(accelerator.kind_here() or "cuda", index, threads=threads)


def _too_many(count: int) -> DeviceError:
    return DeviceError(
        f"got {shown(count)} devices: use at most {MOST_DEVICES} in one process (each CPU device "
        f"has two threads of its own), or start several processes"
    )


def _cgroups(root: Path, proc: Path, controller: str = "cpu") -> list[Path]:
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        here = base / path.lstrip("/")
        groups += [here, *(parent for parent in here.parents if parent.is_relative_to(base))]
    return groups


def _quotas(group: Path) -> list[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def _free_in(group: Path) -> list[int]:
    """Return what the limit of a control group leaves, if it has one: v2, or v1.

    What files are cached is given back when a program needs the memory.
    """
    names = ("memory.max", "memory.current", "inactive_file")
    if not (group / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        most, used = ((group / name).read_text(encoding="utf-8").strip() for name in names[:2])
        lines = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == names[2])
        return [] if most == "max" else [int(most) - int(used) + cached]
    except (OSError, ValueError, IndexError):
        return []
