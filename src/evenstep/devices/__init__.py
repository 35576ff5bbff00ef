"""Devices: finding them, naming them, and moving tensors to them."""

from evenstep.devices.arithmetic import (
    arithmetic_facts,
    hash_seed,
    instruction_facts,
    known_results,
    torch_settings,
)
from evenstep.devices.device import Device, StagedDevice, as_device, in_stages, parse_device
from evenstep.devices.discovery import (
    Devices,
    cgroup_quota_cores,
    find_devices,
    free_memory_nbytes,
    gpu_count,
    layout_notes,
    rounding_notes,
    try_all_gpus,
    try_gpu,
    usable_cores,
)
from evenstep.devices.malloc import kept_memory
from evenstep.devices.placement import carry, deterministic_kernels, intra_op_threads
from evenstep.devices.process_wide import process_wide, short_switch_interval

__all__ = [
    "Device",
    "Devices",
    "StagedDevice",
    "arithmetic_facts",
    "as_device",
    "carry",
    "cgroup_quota_cores",
    "deterministic_kernels",
    "find_devices",
    "free_memory_nbytes",
    "gpu_count",
    "hash_seed",
    "in_stages",
    "instruction_facts",
    "intra_op_threads",
    "kept_memory",
    "known_results",
    "layout_notes",
    "parse_device",
    "process_wide",
    "rounding_notes",
    "short_switch_interval",
    "torch_settings",
    "try_all_gpus",
    "try_gpu",
    "usable_cores",
]
