"""Many calls of one operation: waiting for each result, or once at the end."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

import evenstep
from evenstep.reproduce.engine.common import DEVICES, Job, open_contender, run

WARMUP = 3  # calls on each device


def measure(job: Job) -> dict[str, Any]:
    """Return the seconds of `count` calls, and the page faults of the process.

    The engine runs each call on any free device. With bare threads, one thread makes all calls
    instead of waiting, or two make half of them each. Page faults (those that need no disk) come
    from memory that malloc returned to the system and requests again: a result of this size causes
    thousands or none, depending on malloc's history.
    """
    x = torch.rand(job["size"], job["size"])
    call: tuple[Any, ...] = {"add": (torch.add, x, 1), "mm": (torch.mm, x, x)}[job["operation"]]
    waits_each, count = job["waits"] == "each", job["count"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with open_contender(job) as engine:
        for device in WARMUP * DEVICES:
            engine.submit(*call, device=device)
        engine.waitall()
        began = time.perf_counter()
        if isinstance(engine, evenstep.Engine):
            for _ in range(count):
                y = engine.submit(*call)
                if waits_each:
                    y.wait_to_read()
        else:
            shares = [count] if waits_each else [count - count // 2, count // 2]
            for share, device in zip(shares, DEVICES, strict=False):
                engine.submit(_repeat, share, *call, device=device)
        engine.waitall()
        seconds = time.perf_counter() - began
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"seconds": seconds, "page_faults": faults}


def _repeat(count: int, function: Any, *arguments: Any) -> None:
    for _ in range(count):
        function(*arguments)


if __name__ == "__main__":
    run(measure)
