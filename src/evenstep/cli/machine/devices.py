"""`evenstep devices`: lists the devices of this machine, and what results depend on."""

from __future__ import annotations

import os

import torch
from rich.console import Console

from evenstep.bench.machine import cpu_model
from evenstep.cli.machine.facts import memory_bytes
from evenstep.cli.options.table import Scope
from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.terminal.output import fields_table, print_line, print_table
from evenstep.devices import accelerator, cgroup_quota_cores, gpu_count, try_all_gpus, usable_cores
from evenstep.options.experiment import Experiment

_GIB = 1 << 30


def devices() -> None:
    """Print the devices of this machine, and what results depend on."""
    console = Console()
    print_table(console, fields_table([*_devices(), *_machine()]))
    print_line(console, "")
    print_line(console, "The number of devices does not change a result by a single bit. These do:")
    print_table(console, fields_table((f"  {label}", value) for label, value in _what_differs()))


def _devices() -> list[tuple[str, str]]:
    rows = [("devices", f"{', '.join(map(str, try_all_gpus()))} (--devices auto)")]
    if not gpu_count():
        return [*rows, ("GPUs", "none that torch can use")]
    for gpu in try_all_gpus():
        memory = _gib(accelerator.memory_nbytes(gpu.torch_device)[1])
        rows.append((str(gpu), f"{gpu.model_name}, {memory}"))
    return rows


def _machine() -> list[tuple[str, str]]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "unknown"
    quota = cgroup_quota_cores()
    spelled = "none" if quota is None else f"{quota:g}"
    return [
        ("cores", f"{usable_cores()} usable (affinity {affinity}, cgroup quota {spelled})"),
        ("memory", _memory()),
        ("threads", f"{Experiment().threads} for each CPU device (--threads)"),
        ("processor", cpu_model()),
        ("torch", torch.__version__),
    ]


def _what_differs() -> list[tuple[str, str]]:
    scopes = (Scope.RUN_FILE, Scope.CHECKPOINT)
    flags = [option.flag for option in ExperimentOptions.options() if option.scope in scopes]
    vectors = torch.backends.cpu.get_cpu_capability()
    return [
        ("torch", f"a version other than {torch.__version__}"),
        (
            "device model",
            f"a different GPU or processor, or a GPU instead of a CPU (here: {vectors})",
        ),
        ("experiment", f"a different value of {', '.join(flags)}"),
        ("model", "`random`, numpy or Python state in forward; evenstep verify finds them"),
    ]


def _memory() -> str:
    total, free = memory_bytes()
    if total is None:
        return "unknown"
    return _gib(total) if free is None else f"{_gib(total)}, {_gib(free)} of it free"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"
