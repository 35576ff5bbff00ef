"""`evenstep devices`: what this machine has, and what would make results differ."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import click
import torch
from rich.console import Console

from evenstep.cli.display import print_line, print_table
from evenstep.devices import cgroup_quota_cores, gpu_count, try_all_gpus, usable_cores
from evenstep.experiment import Experiment

_GIB = 1 << 30


@click.command()
def devices() -> None:
    """Show the devices found, and what would make results differ."""
    console = Console()
    print_table(console, [*_found(), *_machine()])
    print_line(console, "")
    print_line(console, "The number of devices does not change a result, not by a bit. These do:")
    print_table(console, [(f"  {label}", value) for label, value in _what_differs()])


def _found() -> list[tuple[str, str]]:
    found = try_all_gpus()
    rows = [("devices", f"{', '.join(map(str, found))} (--devices auto)")]
    if not gpu_count():
        return [*rows, ("GPUs", "none that torch can use")]
    for index in range(gpu_count()):
        facts = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{facts.name}, {_gib(facts.total_memory)}"))
    return rows


def _machine() -> list[tuple[str, str]]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "unknown"
    quota = cgroup_quota_cores()
    spelled = "none" if quota is None else f"{quota:g}"
    return [
        ("cores", f"{usable_cores()} usable (affinity {affinity}, cgroup quota {spelled})"),
        ("memory", _memory()),
        ("threads", f"{Experiment().threads} for each CPU device (--threads)"),
        ("processor", _processor()),
        ("torch", torch.__version__),
    ]


def _what_differs() -> list[tuple[str, str]]:
    vectors = torch.backends.cpu.get_cpu_capability()
    return [
        ("torch", f"another version than {torch.__version__}"),
        ("device model", f"another GPU or processor, a GPU instead of a CPU (here: {vectors})"),
        ("--threads", "another number of threads for each CPU device"),
        ("--shards", "another number of shards: it belongs to the experiment, as --batch-size"),
        ("--precision", "bf16 instead of fp32, and another --memory-format"),
        ("the experiment", "model, data, --seed, --batch-size, --lr, --momentum"),
        ("the model", "`random`, numpy or Python state in forward: evenstep verify finds them"),
    ]


def _memory() -> str:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        facts = {name: int(value.split()[0]) for name, value in (li.split(":") for li in lines)}
        return f"{_gib(total)}, {_gib(facts['MemAvailable'] * 1024)} of it free"
    except (OSError, ValueError, LookupError):
        return _gib(total)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
