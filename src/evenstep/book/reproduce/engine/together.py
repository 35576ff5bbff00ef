"""Two independent batches of products on two devices: one after the other, or together."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

import evenstep
from evenstep.book.reproduce.engine.common import DEVICES, BareThreads, Job, run


def measure(job: Job) -> dict[str, Any]:
    """Return the seconds of both batches, `count` products each."""
    inputs = [torch.rand(job["size"], job["size"]) for _ in DEVICES]
    way = in_engine if job["contender"] == "engine" else in_threads
    return {"seconds": way(inputs, job["count"], together=job["way"] == "together")}


def in_engine(inputs: list[torch.Tensor], count: int, *, together: bool) -> float:
    """Return the seconds with the engine: a batch for each device."""
    with evenstep.Engine(devices=DEVICES) as engine:
        for x, device in zip(inputs, DEVICES, strict=True):
            engine.submit(torch.mm, x, x, device=device)
        engine.waitall()
        began = time.perf_counter()
        results = []
        for x, device in zip(inputs, DEVICES, strict=True):
            results += [engine.submit(torch.mm, x, x, device=device) for _ in range(count)]
            if not together:
                engine.waitall()
        engine.waitall()
        return time.perf_counter() - began


def in_threads(inputs: list[torch.Tensor], count: int, *, together: bool) -> float:
    """Return the seconds with bare threads: a batch for each thread."""
    results: list[torch.Tensor] = []

    def products(x: torch.Tensor, number: int) -> None:
        results.extend([x @ x for _ in range(number)])

    with BareThreads() as threads:
        for thread, x in enumerate(inputs):
            threads.start(thread, functools.partial(products, x, 1))
        threads.wait()
        began = time.perf_counter()
        for thread, x in enumerate(inputs):
            threads.start(thread, functools.partial(products, x, count))
            if not together:
                threads.wait()
        threads.wait()
        return time.perf_counter() - began


if __name__ == "__main__":
    run(measure)
