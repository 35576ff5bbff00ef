"""Products on one device, copied to a different memory: after all products, or one by one."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import evenstep
from evenstep.reproduce.engine.common import DEVICES, BareThreads, Job, run

HERE, THERE = "cpu:0", "cpu:1:own"


def measure(job: Job) -> dict[str, Any]:
    """Return the median seconds of `count` products (size, inner) x (inner, size) and their copies.

    If both are done one after the other, also return their separate seconds, and the largest
    possible gain of overlapping: the sum of both over the longer one.
    """
    a, b = torch.rand(job["size"], job["inner"]), torch.rand(job["inner"], job["size"])
    is_engine = job["contender"] == "engine"
    with evenstep.Engine(devices=[HERE, THERE]) if is_engine else BareThreads() as engine:
        times = [_once(engine, a, b, job) for _ in range(1 + job["repeats"])][1:]
    total_s = statistics.median(compute + copy for compute, copy in times)
    if job["way"] == "together":
        return {"seconds": total_s}
    return {
        "seconds": total_s,
        "compute_s": statistics.median(compute for compute, _ in times),
        "copy_s": statistics.median(copy for _, copy in times),
        "most_gain": statistics.median(sum(both) / max(both) for both in times),
    }


def _once(engine: Any, a: torch.Tensor, b: torch.Tensor, job: Job) -> tuple[float, float]:
    """Return the seconds of products and copies; (both, 0) if they overlap."""
    began = middle = time.perf_counter()
    products = [engine.submit(torch.mm, a, b, device=HERE) for _ in range(job["count"])]
    if job["way"] == "apart":
        engine.waitall()
        middle = time.perf_counter()
    if isinstance(engine, evenstep.Engine):
        copies = [engine.copy(product, THERE) for product in products]
    else:  # the copying thread waits for each product
        copies = [
            engine.submit(lambda one=product: one.result().clone(), device=DEVICES[1])
            for product in products
        ]
    engine.waitall()
    del copies
    ended = time.perf_counter()
    return (middle - began, ended - middle) if job["way"] == "apart" else (ended - began, 0.0)


if __name__ == "__main__":
    run(measure)
