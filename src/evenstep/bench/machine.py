"""Facts about machine and software for result files, without host names or paths."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from evenstep.devices import usable_cores
from evenstep.errors import InputError

PACKAGES = ("evenstep", "torch", "numpy", "accelerate", "lightning-fabric")
_SOURCE = Path(__file__).resolve().parents[2]
_CODE = ("src", "benchmarks/*.py")


def require_linux() -> None:
    """Say that measuring needs Linux, if this is another system.

    Raises:
        InputError: it is.
    """
    if sys.platform != "linux":
        raise InputError(
            "evenstep bench and evenstep reproduce measure memory and page faults as Linux counts "
            "them: run them on Linux"
        )


def facts() -> dict[str, Any]:
    """Return the facts that every result file records.

    Raises:
        InputError: this is not Linux.
    """
    require_linux()
    return {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "usable_cores": usable_cores(),
        "memory_gib": round(_kib("/proc/meminfo", "MemTotal") / 2**20, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "git_revision": git_revision(),
    }


def cpu_model() -> str:
    """Return the name of the processor."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def package_version(name: str) -> str | None:
    """Return the installed version of a package; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """Return the revision of evenstep's checkout, with "+" if the sources have changed since.

    None if evenstep is not installed from a checkout.
    """
    git = ["git", "--no-optional-locks", "-C", str(_SOURCE.parent)]
    commands = (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", *_CODE])
    try:
        revision, changed = (
            subprocess.run([*git, *one], capture_output=True, text=True, check=True).stdout.strip()
            for one in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "") if _SOURCE.name == "src" else None


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process (VmHWM), in bytes.

    `getrusage` would not do: its ru_maxrss starts from the peak of the parent process.
    """
    return 1024 * _kib("/proc/self/status", "VmHWM")


def resident_bytes() -> int:
    """Return the current resident memory of this process (VmRSS), in bytes."""
    return 1024 * _kib("/proc/self/status", "VmRSS")


def _kib(file: str, field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", _read(file), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"got no field {field} in {file}: memory is measured on Linux only")
    return int(found[1])


def _read(file: str) -> str:
    return Path(file).read_text(encoding="utf-8") if Path(file).exists() else ""
