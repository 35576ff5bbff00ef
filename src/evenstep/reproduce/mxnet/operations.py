"""The queue in MXNet's words: what returns when, what waiting costs, and two contexts at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from evenstep import mxnet as mx
from evenstep.bench import fresh
from evenstep.mxnet import nd

Job = Mapping[str, Any]


def queued(job: Job) -> dict[str, Any]:
    """Return the median seconds until `nd.dot(x, x).sum()` returned, and until its result."""
    x = nd.random.uniform(shape=(job["size"], job["size"]))
    nd.dot(x, x).sum().wait_to_read()
    returned, finished = [], []
    for _ in range(job["repeats"]):
        began = time.perf_counter()
        y = nd.dot(x, x).sum()
        returned.append(time.perf_counter() - began)
        y.wait_to_read()
        finished.append(time.perf_counter() - began)
    return {"queued_s": statistics.median(returned), "finished_s": statistics.median(finished)}


def waiting(job: Job) -> dict[str, Any]:
    """Return the seconds of `count` sums or products, with a wait each time or one at the end."""
    x = nd.random.uniform(shape=(job["size"], job["size"]))
    calls: dict[str, Callable[[], Any]] = {"add": lambda: x + 1, "mm": lambda: nd.dot(x, x)}
    call = calls[job["operation"]]
    call().wait_to_read()
    began = time.perf_counter()
    for _ in range(job["count"]):
        y = call()
        if job["waits"] == "each":
            y.wait_to_read()
    nd.waitall()
    return {"seconds": time.perf_counter() - began}


def together(job: Job) -> dict[str, Any]:
    """Return the seconds of `count` products on each of two contexts."""
    shape = (job["size"], job["size"])
    inputs = [nd.random.uniform(shape=shape, ctx=context) for context in (mx.cpu(), mx.gpu(0))]
    for x in inputs:
        nd.dot(x, x)
    nd.waitall()
    began, results = time.perf_counter(), []
    for x in inputs:
        results += [nd.dot(x, x) for _ in range(job["count"])]
        if job["way"] == "apart":
            nd.waitall()
    nd.waitall()
    return {"seconds": time.perf_counter() - began}


_MEASURES = {"queued": queued, "add": waiting, "mm": waiting, "together": together}


def measure(job: Job) -> dict[str, Any]:
    """Measure what the job names."""
    torch.set_num_threads(1)
    return _MEASURES[job["measure"]](job)


if __name__ == "__main__":
    fresh.answer(measure)
