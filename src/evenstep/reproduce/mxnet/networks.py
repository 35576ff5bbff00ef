"""A small network called many times, hybridized or not; and the memory of an unbounded queue."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from evenstep.bench import fresh, machine
from evenstep.mxnet import autograd, gluon, nd
from evenstep.mxnet.gluon import nn

Job = Mapping[str, Any]
FEATURES = 512


def calls(job: Job) -> dict[str, Any]:
    """Return the shortest mean microseconds of a call, over rounds of `calls` calls."""
    net, x = nn.HybridSequential(), nd.random.normal(shape=(1, FEATURES))
    net.add(nn.Dense(256, activation="relu"), nn.Dense(128, activation="relu"), nn.Dense(2))
    net.initialize()
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(job["rounds"]):
        for active, times in found.items():
            net.hybridize(active)
            net(x).wait_to_read()
            began = time.perf_counter()
            for _ in range(job["calls"]):
                net(x)
            nd.waitall()
            times.append(1e6 * (time.perf_counter() - began) / job["calls"])
    return {"eager_us": min(found[False]), "hybrid_us": min(found[True])}


def memory(job: Job) -> dict[str, Any]:
    """Return the growth of the process, with and without reading each loss by `asscalar`."""
    net = nn.Sequential()
    net.add(nn.Dense(2048, activation="relu"), nn.Dense(512, activation="relu"), nn.Dense(1))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.005})
    _train(net, trainer, job, batches=1)
    nd.waitall()
    start_bytes, began = machine.resident_bytes(), time.perf_counter()
    _train(net, trainer, job, batches=job["batches"])
    made_s = time.perf_counter() - began
    nd.waitall()
    return {
        "peak_growth_bytes": machine.peak_memory_bytes() - start_bytes,
        "end_growth_bytes": machine.resident_bytes() - start_bytes,
        "made_s": made_s,
        "seconds": time.perf_counter() - began,
    }


def _train(net: Any, trainer: gluon.Trainer, job: Job, batches: int) -> None:
    loss = gluon.loss.L2Loss()
    for _ in range(batches):
        X, y = nd.random.normal(shape=(job["examples"], FEATURES)), nd.ones((job["examples"],))
        with autograd.record():
            found = loss(y, net(X))
        if job["bound"] == "asscalar":
            found.mean().asscalar()
        found.backward()
        trainer.step(job["examples"])


_MEASURES = {"calls": calls, "memory": memory}


def measure(job: Job) -> dict[str, Any]:
    """Measure what the job names."""
    torch.set_num_threads(1)
    return _MEASURES[job["measure"]](job)


if __name__ == "__main__":
    fresh.answer(measure)
