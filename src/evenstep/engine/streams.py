"""Order between the CUDA streams of the lanes: events, so that no lane waits for a kernel to end.

For the scheduler a task on a GPU is done when its kernels are launched. What takes its result runs
on another lane's stream, which is told to wait for the event (`fence`) that was recorded behind
those kernels. Without GPUs nothing here is called.
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
    """Return a copy of every tensor in `value` in the memory of `device`; the rest as it is."""

    def copied(leaf: Any) -> Any:
        return carry(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

    return optree.tree_map(copied, value)


def fence_here(device: Device) -> Any:
    """Record an event behind everything that the calling thread has launched on a GPU."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device.index))
    return event


def wait_for(fences: Iterable[Any], device: Device) -> None:
    """Let what comes on the calling thread's lane wait for `fences`; a CPU lane waits itself."""
    for fence in fences:
        if fence is None:
            continue
        if device.kind == "cuda":
            torch.cuda.current_stream(device.index).wait_event(fence)
        else:
            fence.synchronize()


def open_task(task: Task, device: Device) -> None:
    """Order the lane's stream behind the submission, and behind all that the task takes."""
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
    """Leave a fence behind what the task has launched."""
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
    """Tell torch's allocator that the calling lane's stream uses the memory of `value` too."""
    for leaf in optree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(torch.cuda.current_stream(leaf.device))
