"""Copies tensors to devices, and sets how torch computes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from evenstep.devices import accelerator
from evenstep.devices.device import Device
from evenstep.devices.process_wide import process_wide


def carry(
    tensor: torch.Tensor, device: Device, memory_format: torch.memory_format = torch.preserve_format
) -> torch.Tensor:
    """Return a copy of `tensor` in the memory of `device`, in an allocation of its own.

    A copy to an accelerator goes through pinned memory, on the current stream.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    target = device.torch_device
    if device.is_accelerator and tensor.device.type == "cpu":
        pinned = accelerator.pinned(tensor)
        return pinned.to(target, copy=True, memory_format=memory_format, non_blocking=True)
    return tensor.to(target, copy=True, memory_format=memory_format)


@contextmanager
def intra_op_threads(threads: int) -> Iterator[None]:
    """Set the number of intra-op threads of the calling thread while the context is open."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def deterministic_kernels(devices: Sequence[Device]) -> AbstractContextManager[None]:
    """Return a context that uses deterministic kernels of accelerators; no effect without one.

    Turns off cuDNN's autotuning, which picks kernels by timing, and turns on torch's deterministic
    algorithms, without a fill of all new memory; restores the settings at the end.
    """
    has_gpu = any(device.is_accelerator for device in devices)
    return _deterministic_kernels() if has_gpu else nullcontext()


@process_wide
@contextmanager
def _deterministic_kernels() -> Iterator[None]:
    benchmark = torch.backends.cudnn.benchmark
    algorithms = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(algorithms, warn_only=only_warns)
        memory.fill_uninitialized_memory = fills
