"""Memory of a training whose batches are made faster than they are trained on.

As in the book: batches of noise, an MLP, no waiting for the loss. `maker` is what makes the
batches: the training loop ("front"), or tasks ("tasks"), like every operator of MXNet. `bound`
limits the queue: not at all ("none"), by `max_in_flight=2` ("two"), or by waiting for each loss
("waits").
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep.bench import machine
from evenstep.reproduce.engine.common import DEVICES, Job, run

FEATURES, HIDDEN = 512, (2048, 512)
LEARNING_RATE = 0.005
MAX_IN_FLIGHT = {"waits": None, "none": None, "two": 2}

Training = tuple[nn.Module, torch.optim.Optimizer]


def measure(job: Job) -> dict[str, Any]:
    """Return the growth of the process at its peak and at the end, and the seconds.

    Growth counts from the resident memory after one batch. The peak of that batch is included, so
    the figure is never too small. "made_s" are the seconds until all batches were submitted.
    """
    with evenstep.Engine(devices=DEVICES, max_in_flight=MAX_IN_FLIGHT[job["bound"]]) as engine:
        training = engine.Var(make_training(), "the network")
        submit_batch(engine, training, job)
        engine.waitall()
        start_bytes, began = machine.resident_bytes(), time.perf_counter()
        for _ in range(job["batches"]):
            loss = submit_batch(engine, training, job)
            if job["bound"] == "waits":
                loss.item()
        made_s = time.perf_counter() - began
        engine.waitall()
        return {
            "peak_growth_bytes": machine.peak_memory_bytes() - start_bytes,
            "end_growth_bytes": machine.resident_bytes() - start_bytes,
            "made_s": made_s,
            "seconds": time.perf_counter() - began,
        }


def make_training() -> Training:
    """Return the book's MLP and its optimizer."""
    wide, narrow = HIDDEN
    hidden = (nn.Linear(FEATURES, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU())
    net = nn.Sequential(*hidden, nn.Linear(narrow, 1))
    return net, torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)


def submit_batch(
    engine: evenstep.Engine, training: evenstep.engine.Var, job: Job
) -> evenstep.engine.Handle:
    """Make a batch or submit tasks that do, submit a step on it, and return the loss."""
    x: Any
    y: Any
    if job["maker"] == "front":
        x, y = torch.randn(job["examples"], FEATURES), torch.ones(job["examples"])
    else:
        x = engine.submit(torch.randn, job["examples"], FEATURES)
        y = engine.submit(torch.ones, job["examples"])
    return engine.submit(train, training, x, y, writes=[training])


def train(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Take a step of SGD on the squared loss and return the loss."""
    net, optimizer = training
    optimizer.zero_grad()
    loss: torch.Tensor = ((net(x).squeeze(1) - y) ** 2 / 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


if __name__ == "__main__":
    run(measure)
