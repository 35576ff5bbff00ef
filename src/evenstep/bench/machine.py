"""Facts about the machine and the software that a result belongs to. No host names, no paths."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from evenstep.devices import usable_cores

PACKAGES = ("evenstep", "torch", "numpy", "accelerate", "lightning-fabric")
_SOURCE = Path(__file__).resolve().parents[2]


def facts() -> dict[str, Any]:
    """Return what every result file says about where and when it was made."""
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
    """Return the processor's name."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def package_version(name: str) -> str | None:
    """Return the installed version of a package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """Return the revision of evenstep's checkout, "+" behind it if the sources were changed since.

    None where evenstep is installed without its checkout.
    """
    if _SOURCE.name != "src":
        return None
    revision = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return revision and revision + ("+" if changed else "")


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process (VmHWM), in bytes.

    Not `getrusage`: its ru_maxrss starts from the peak of the process that forked this one.
    """
    return 1024 * _kib("/proc/self/status", "VmHWM")


def resident_bytes() -> int:
    """Return the resident memory of this process now (VmRSS), in bytes."""
    return 1024 * _kib("/proc/self/status", "VmRSS")


def _kib(file: str, field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", _read(file), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{file} has no field {field}: these benchmarks need Linux")
    return int(found[1])


def _read(file: str) -> str:
    return Path(file).read_text() if Path(file).exists() else ""


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(_SOURCE.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
