"""Orders the CUDA streams of the lanes by events, so that no thread waits for kernels to finish.

To the scheduler, a task on a GPU has ended when its kernels are launched. An event (`fence`) is
recorded behind them, and the stream of any task that takes the result waits for that event. Without
GPUs nothing here is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optree
import torch

from evenstep.devices import Device, carry
from evenstep.engine.graph import Place
from evenstep.engine.handle import Handle, Var
from evenstep.engine.task import Task


def copy_to(value: Any, device: Device) -> Any:
    """Return `value` with every tensor in it copied to `device`; everything else is unchanged."""

    def copied(leaf: Any) -> Any:
        return carry(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    return optree.tree_map(copied, value)


def fence_here(device: Device) -> Any:
    """Record an event behind the kernels that the calling thread has launched on a GPU."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device.index))
    return event


def wait_for(fences: Iterable[Any], device: Device) -> None:
    """Make a GPU's current stream wait for `fences`; on a CPU device, block until they pass."""
    for fence in fences:
        if fence is None:
            continue
        if device.kind == "cuda":
            torch.cuda.current_stream(device.index).wait_event(fence)
        else:
            fence.synchronize()


def open_task(task: Task, device: Device) -> None:
    """Make the lane's stream wait for the submitting thread's kernels and the task's inputs."""
    wait_for(task.after, device)
    for source in task.sources:
        if isinstance(source, Handle):
            wait_for([source.task.fence], device)
            if device.kind == "cuda":
                keep(source.task.result)
    for place in (*task.reads, *task.writes):
        assert isinstance(place, Var)
        wait_for(place.fences, device)


def close_task(task: Task, device: Device) -> None:
    """Record a fence behind the task's kernels, and on the places that it used."""
    task.fence = fence_here(device) if device.kind == "cuda" else None
    for place in task.writes:
        _fences_of(place)[:] = [task.fence]
    for place in task.reads:
        fences = _fences_of(place)
        fences[:] = [fence for fence in fences if fence is not None and not fence.query()]
        fences.append(task.fence)


def _fences_of(place: Place) -> list[Any]:
    assert isinstance(place, Var)
    return place.fences


def keep(value: Any) -> None:
    """Mark the memory of `value` as used by the current stream, so that it is not reused early."""
    for leaf in optree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(torch.cuda.current_stream(leaf.device))
