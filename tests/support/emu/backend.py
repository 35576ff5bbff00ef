"""The backend of the emulated accelerator in torch.distributed, "emuccl": NCCL's manners over gloo.

A collective is queued on a stream of the group's own, behind the current stream, and runs at its
turn there. `Work.wait` makes the current stream wait, not the calling thread. When a process is
lost, the others' streams stand still until they abort the group.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

MOVED: Counter[str] = Counter()
"""Bytes that this process has sent to others, and calls, by collective."""


class _Work(dist.Work):
    """A collective that was queued; the group's stream has its end."""

    def __init__(self, stream: torch.Stream, event: torch.Event) -> None:
        super().__init__()
        self._stream, self._event = stream, event

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self._stream.device_index).wait_event(self._event)
        return True


class Backend(dist.ProcessGroup):
    """A group of processes that have one emulated accelerator each."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._own, self._count = rank, size
        self._gloo = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._gloo._set_default_backend(kind)
        self._gloo._register_backend(torch.device("cpu"), kind, gloo)
        self._boxed = self._gloo.boxed()
        self._stream: torch.Stream | None = None

    def alltoall_base(
        self, out: Any, given: Any, taken: list[int], to_each: list[int], opts: Any = None
    ) -> dist.Work:
        sent = sum(to_each) - to_each[self._own]
        return self._queue("all_to_all", out, given, sent, taken, to_each)

    def allgather(self, outs: Any, given: Any, opts: Any = None) -> dist.Work:
        (outs,), (given,) = outs, given
        assert {len(one) for one in outs} == {len(given)}
        flat = given.new_empty(self._count * len(given))
        sent = (self._count - 1) * given.nbytes
        return self._queue("all_gather", flat, given, sent, copied_to=outs)

    def abort(self) -> None:
        torch.ops.emu.abort_collectives()

    def _queue(
        self, kind: str, out: Any, given: Any, sent: int, *splits: Any, copied_to: Any = ()
    ) -> dist.Work:
        MOVED[kind] += sent
        MOVED[f"{kind} calls"] += 1
        self._stream = self._stream or torch.Stream(out.device)
        stream, device = self._stream, torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(out.device.index)
        stream.wait_stream(before)
        torch.accelerator.set_stream(stream)
        taken, to_each = splits or ((), ())
        torch.ops.emu.collective(kind, self._boxed, [out], [given], 0, taken, to_each)
        for rank, one in enumerate(copied_to):
            one.copy_(out[rank * len(given) : (rank + 1) * len(given)])
        for one in (out, given, *copied_to):
            one.record_stream(stream)
        event = torch.Event(out.device)
        event.record(stream)
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)
        return _Work(stream, event)


def register(make: Any = Backend) -> None:
    """Make `make` what torch.distributed calls for a group of emulated accelerators."""
    dist.Backend.register_backend("emuccl", make, devices=["emu"])
