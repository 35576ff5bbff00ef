"""Products on one device, copied to the memory of another: afterwards, or as each one is there."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import evenstep
from evenstep.book.reproduce.engine.common import BareThreads, Job, run

HERE, THERE = "cpu:0", "cpu:1:own"

Ways = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]


def measure(job: Job) -> dict[str, Any]:
    """Return the median seconds of `count` products (size, inner) x (inner, size) and their copies.

    One after the other: also those of the products and of the copies by themselves, and what
    overlapping could gain at most: the sum of both over the longer one.
    """
    a, b = torch.rand(job["size"], job["inner"]), torch.rand(job["inner"], job["size"])
    way = in_engine if job["contender"] == "engine" else in_threads
    times = way(a, b, job)
    total = statistics.median([compute + copy for compute, copy in times])
    if job["way"] == "together":
        return {"seconds": total}
    return {
        "seconds": total,
        "compute_s": statistics.median([compute for compute, _ in times]),
        "copy_s": statistics.median([copy for _, copy in times]),
        "most_gain": statistics.median(
            [(compute + copy) / max(compute, copy) for compute, copy in times]
        ),
    }


def in_engine(a: torch.Tensor, b: torch.Tensor, job: Job) -> list[tuple[float, float]]:
    """Return for each repeat the seconds of both parts; together: of both at once, and 0."""
    with evenstep.Engine(devices=[HERE, THERE]) as engine:

        def once() -> tuple[float, float]:
            began = middle = time.perf_counter()
            products = [engine.submit(torch.mm, a, b, device=HERE) for _ in range(job["count"])]
            if job["way"] == "apart":
                engine.waitall()
                middle = time.perf_counter()
            copies = [engine.copy(product, THERE) for product in products]
            engine.waitall()
            del copies
            return _parts(began, middle, job["way"] == "together")

        once()
        return [once() for _ in range(job["repeats"])]


def in_threads(a: torch.Tensor, b: torch.Tensor, job: Job) -> list[tuple[float, float]]:
    """Return the same with two bare threads and a queue between them."""
    with BareThreads() as threads:

        def once() -> tuple[float, float]:
            products: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
            kept: list[torch.Tensor] = []

            def compute() -> None:
                for _ in range(job["count"]):
                    kept.append(a @ b)
                    products.put(kept[-1])

            def copy() -> None:
                kept.extend([products.get().clone() for _ in range(job["count"])])

            began = middle = time.perf_counter()
            threads.start(0, compute)
            if job["way"] == "apart":
                threads.wait()
                middle = time.perf_counter()
            threads.start(1, copy)
            threads.wait()
            return _parts(began, middle, job["way"] == "together")

        once()
        return [once() for _ in range(job["repeats"])]


def _parts(began: float, middle: float, together: bool) -> tuple[float, float]:
    ended = time.perf_counter()
    return (ended - began, 0.0) if together else (middle - began, ended - middle)


if __name__ == "__main__":
    run(measure)
