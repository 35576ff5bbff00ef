"""Reads the facts about this machine that `evenstep doctor` and `evenstep devices` show."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from evenstep.bench.machine import package_version
from evenstep.cli.machine.checks import FEATURES, SHARED, MachineFacts
from evenstep.cli.machine.load import cores_used_by_others
from evenstep.devices import gpu_count, try_all_gpus, usable_cores
from evenstep.private_torch.names import missing_names

_COMPILERS = ("c++", "g++", "clang++")
_CLOCKS = Path("/sys/devices/system/cpu/cpufreq")
_SUPPLIES = Path("/sys/class/power_supply")
_NVIDIA = Path("/proc/driver/nvidia/version")


def read_facts(environment: Mapping[str, str]) -> MachineFacts:
    """Return the facts, which takes half a second.

    Args:
        environment: the environment variables as the user has set them.
    """
    names = {name for feature in FEATURES for name in feature.packages}
    versions = {name: package_version(name) for name in sorted(names)}
    return MachineFacts(
        system=platform.system(),
        has_lock=getattr(sys, "_is_gil_enabled", lambda: True)(),  # since Python 3.13
        evenstep=package_version("evenstep"),
        torch=torch.__version__,
        torch_lacks=missing_names(),
        packages={name: version for name, version in versions.items() if version is not None},
        has_compiler=any(map(shutil.which, _COMPILERS)),
        cores=usable_cores(),
        cores_used_by_others=cores_used_by_others(),
        free_bytes=memory_bytes()[1],
        shared_bytes=shutil.disk_usage(SHARED).total if os.path.isdir(SHARED) else None,
        governors=_governors(),
        is_on_battery=_is_on_battery(),
        gpus=tuple(gpu.model_name for gpu in try_all_gpus()) if gpu_count() else (),
        has_nvidia_driver=_NVIDIA.exists(),
        environment=environment,
    )


def memory_bytes() -> tuple[int | None, int | None]:
    """Return the size of the memory, and how much of it is free; None if that is unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # on Windows, or where these have other names
        total = None
    free = re.search(r"MemAvailable:\s*(\d+) kB", _read(Path("/proc/meminfo")))
    return total, int(free[1]) * 1024 if free else None


def _governors() -> tuple[tuple[str, str], ...]:
    found = {
        (_read(policy / "scaling_driver"), _read(policy / "scaling_governor"))
        for policy in _CLOCKS.glob("policy*")
    }
    return tuple(sorted(found))


def _is_on_battery() -> bool:
    mains = [one for one in _SUPPLIES.glob("*") if _read(one / "type") == "Mains"]
    return bool(mains) and all(_read(one / "online") == "0" for one in mains)


def _read(file: Path) -> str:
    """Return the content of a file of the system, without the line's end; "" if it is missing."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
