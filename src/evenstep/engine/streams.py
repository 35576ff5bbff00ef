"""Orders the streams of accelerators' lanes by events, so that no thread waits for kernels.

To the scheduler, a task on an accelerator has ended when its kernels are launched. An event
(`fence`) is recorded behind them, and the stream of any task that takes the result waits for that
event. Without accelerators nothing here is called.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch

from evenstep.devices import Device, accelerator, carry
from evenstep.engine.graph import Place
from evenstep.engine.handle import Handle, Var
from evenstep.engine.task import Task

_LOOK_S = 1e-3  # the longest time between two looks at a fence


def copy_to(value: Any, device: Device) -> Any:
    """Return `value` with every tensor in it copied to `device`; everything else is unchanged.

    Copies from accelerators to a CPU are waited for together, not one by one.
    """
    sources = set[torch.device]()

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if device.is_accelerator or leaf.device.type == "cpu":
            return carry(leaf, device)
        sources.add(leaf.device)
        return copied_to_host(leaf.detach())

    found = optree.tree_map(copied, value)
    finish([accelerator.fence_here(source) for source in sources])
    return found


def copy_each(tensors: Sequence[Any], devices: Sequence[Device]) -> list[Any]:
    """Return copies of tensors, each on a device of its own; None where there is no tensor."""
    if len({*devices}) < 2:
        return [*copy_to(tensors, devices[0])] if tensors else []
    return [*map(copy_to, tensors, devices)]


def copied_to_host(value: Any) -> Any:
    """Return `value` with every tensor copied to pinned memory behind the kernels launched here.

    The host may read them once a fence that is recorded afterwards has passed.
    """

    def copied(leaf: Any) -> Any:
        return accelerator.copy_to_pinned(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return optree.tree_map(copied, value)


class _AllOf(NamedTuple):
    """Events on several accelerators, on which one replica lies."""

    events: Sequence[Any]

    def query(self) -> bool:
        """Return whether all have passed."""
        return all(event.query() for event in self.events)


def fence_here(device: Device) -> Any:
    """Record an event behind the kernels that the calling thread has launched on a device.

    If a replica lies on several accelerators, behind those on all of them.
    """
    events = [accelerator.fence_here(part.torch_device) for part in device.parts]
    return events[0] if len(events) == 1 else _AllOf(events)


def fences_here(devices: Iterable[Device]) -> list[Any]:
    """Record an event on each accelerator, except those that have failed: no task runs there."""
    fences = []
    for device in devices:
        if device.is_accelerator:
            with contextlib.suppress(RuntimeError):
                fences.append(accelerator.fence_here(device.torch_device))
    return fences


def wait_for(fences: Iterable[Any], device: Device) -> None:
    """Make an accelerator's current stream wait for `fences`; for a CPU device, block."""
    for fence in fences:
        if fence is None:
            continue
        if not device.is_accelerator:
            finish([fence])
            continue
        for event in fence.events if isinstance(fence, _AllOf) else (fence,):
            for part in device.parts:
                accelerator.wait_here(event, part.torch_device)


def finish(fences: Iterable[Any], unless: Callable[[], bool] = lambda: False) -> bool:
    """Wait until `fences` pass, or `unless()` is true; return whether all have passed.

    It polls, at least every millisecond, instead of blocking in torch: a blocking wait would never
    return from a device that stands still.

    Args:
        fences: events, or None for one that has passed.
        unless: whether to give up.
    """
    for fence in fences:
        began_s = time.perf_counter()
        while fence is not None and not fence.query():
            if unless():
                return False
            time.sleep(min(_LOOK_S, (time.perf_counter() - began_s) / 50))
    return True


def finish_elsewhere(tensors: Iterable[torch.Tensor], devices: Sequence[Device]) -> None:
    """Wait for the caller's kernels on accelerators with `tensors` that are none of `devices`.

    Lanes wait for its current streams on their own devices only.
    """
    found = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if found:
        kind, own = accelerator.kind_here(), {device.torch_device for device in devices}
        finish([accelerator.fence_here(one) for one in found - own if one.type == kind])


class Given(NamedTuple):
    """A value that threads on other devices, or with other streams, may take.

    Attributes:
        value: nested tuples, lists and dicts of tensors.
        device: whose memory its tensors are in.
        fence: behind the kernels that compute them; None on a CPU.
    """

    value: Any
    device: Device
    fence: Any


def given_from(device: Device, value: Any) -> Given:
    """Return a value of the calling thread, which has computed it on `device`, for others."""
    return Given(value, device, fence_here(device) if device.is_accelerator else None)


def taken(given: Given, device: Device) -> Any:
    """Return what another thread has given, where it lies, for the calling thread's `device`."""
    if given.fence is not None:
        wait_for([given.fence], device)
        keep(given.value)
    return given.value


def received(given: Given, device: Device) -> Any:
    """Return what another thread has given, in the memory of the calling thread's `device`."""
    value = taken(given, device)
    is_there = given.device.torch_device == device.torch_device
    return value if is_there else copy_to(value, device)


def open_task(task: Task, device: Device) -> None:
    """Make the lane's stream wait for the submitting thread's kernels and the task's inputs."""
    wait_for(task.after, device)
    keep(task.arguments)
    for source in task.sources:
        if isinstance(source, Handle):
            wait_for([source.task.fence], device)
            keep(source.task.result)
    for place in (*task.reads, *task.writes):
        assert isinstance(place, Var)
        wait_for([place.written], device)
        keep(place.value_in_task())
    for place in task.writes:
        wait_for([*_fences_of(place)], device)


def close_task(task: Task, device: Device) -> None:
    """Record a fence behind the task's kernels, also those of a task that has failed."""
    task.fence = fence_here(device) if device.is_accelerator else None


def note_fence(task: Task) -> None:
    """Note the fence of an ended task on the places that it used; one call at a time."""
    for place in task.writes:
        assert isinstance(place, Var)
        place.written, place.fences = task.fence, []
    for place in task.reads:
        fences = _fences_of(place)
        fences[:] = [fence for fence in fences if fence is not None and not _is_over(fence)]
        fences.append(task.fence)


def _is_over(fence: Any) -> bool:
    """Return whether an event has passed, or never will, since its device has failed."""
    try:
        return bool(fence.query())
    except RuntimeError:
        return True


def _fences_of(place: Place) -> list[Any]:
    assert isinstance(place, Var)
    return place.fences


def keep(value: Any) -> None:
    """Mark the memory of `value` as used by the current stream, so that it is not reused early."""
    for leaf in optree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            accelerator.keep(leaf)
