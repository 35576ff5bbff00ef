"""Tensors brought into the memory of a device, and how torch is to compute there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from evenstep.devices.device import Device


def carry(
    tensor: torch.Tensor, device: Device, memory_format: torch.memory_format = torch.preserve_format
) -> torch.Tensor:
    """Return a copy of `tensor` in the memory of `device`, in an allocation of its own.

    To a GPU it goes through pinned memory, in the order of the calling thread's stream.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    target = device.torch_device
    if device.kind == "cuda" and not tensor.is_cuda:
        pinned = tensor.pin_memory()
        return pinned.to(target, copy=True, memory_format=memory_format, non_blocking=True)
    return tensor.to(target, copy=True, memory_format=memory_format)


@contextmanager
def intra_op_threads(threads: int) -> Iterator[None]:
    """Let torch use `threads` threads in the calling thread, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic_kernels(devices: Sequence[Device]) -> Iterator[None]:
    """On CUDA devices, keep torch to kernels whose bits don't depend on timing.

    Switches off cuDNN's autotuning and asks for deterministic algorithms; puts both back.
    """
    if all(device.kind == "cpu" for device in devices):
        yield
        return
    benchmark = torch.backends.cudnn.benchmark
    algorithms = torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(algorithms)
