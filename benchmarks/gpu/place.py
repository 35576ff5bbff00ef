"""Where the parts run: the accelerator, real or emulated, and what differs between the two."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
EMULATED = "emu"


def environment() -> dict[str, str]:
    """Return what is added to the environment of a part's process."""
    paths = [ROOT / "src", ROOT / "tests/support", ROOT / "tests/zoo", ROOT / "benchmarks"]
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
    }


def prepare(device: str) -> None:
    """Make the accelerator usable in this process."""
    if device == EMULATED:
        import emu

        emu.load(ROOT / "build")
        emu.configure()
    if not torch.accelerator.is_available():
        sys.exit("no accelerator is there: name the emulated one, --device emu")


def facts(device: str) -> dict[str, Any]:
    """Return what the accelerator and its libraries are."""
    module = torch.get_device_module(device)
    named = getattr(module, "get_device_name", None)
    return {
        "model": named(0) if named else device,
        "count": module.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
    }


@contextlib.contextmanager
def counted_waits(device: str) -> Iterator[list[int]]:
    """Inside `with`, count how often the host waits for the accelerator in a blocking call."""
    found: list[int] = []
    if device == EMULATED:
        import emu

        emu.host_waits()
        yield found
        waits = emu.host_waits()
        found.append(waits.total() - waits[emu.POLLING])
        return
    seen: list[object] = []
    before = warnings.showwarning
    warnings.showwarning = lambda *given, **more: seen.append(given)  # of all threads
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = before
        found.append(len(seen))


def peak_bytes(device: str, *, reset: bool = False) -> int | None:
    """Return the most memory that tensors took, since a reset; None where nobody counts it."""
    module: Any = torch.get_device_module(device)
    if reset and hasattr(module, "reset_peak_memory_stats"):
        torch.accelerator.empty_cache()
        module.reset_peak_memory_stats()
    counted = getattr(module, "max_memory_allocated", None)
    return None if counted is None else int(counted())
