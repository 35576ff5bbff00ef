"""Steps of an empty model (one scalar parameter): what is left is a step's own overhead.

`{"devices": 0}` is a plain loop over the same shards without evenstep: forward, backward, the
gradients added up by torch, divided and applied. `"inline": true` takes lanes without threads.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import evenstep
from evenstep.engine import InlineLanes, ThreadLanes

LEARNING_RATE = 0.01


class Scalar(nn.Module):
    """Multiply by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n,) to (n,)."""
        return x * self.factor


def main() -> None:
    """Time every step by itself, and print the line."""
    job = json.loads(sys.argv[1])
    shards, model = job["shards"], Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = torch.zeros(shards)
    if job["devices"] == 0:
        torch.set_num_threads(1)
        seconds = time_each(job, lambda: plain_step(model, optimizer, batch, shards))
    else:
        devices = [f"cpu:{number}" for number in range(job["devices"])]
        lanes = InlineLanes if job.get("inline") else ThreadLanes
        with evenstep.Trainer(
            model, optimizer, objective=objective, devices=devices, shards=shards, lanes=lanes
        ) as trainer:
            seconds = time_each(job, lambda: trainer.step(batch))
    tenths = statistics.quantiles(seconds, n=10)
    print(
        json.dumps(
            {
                "median_ms": 1e3 * statistics.median(seconds),
                "tenth_ms": 1e3 * tenths[0],
                "ninetieth_ms": 1e3 * tenths[-1],
            }
        )
    )


def objective(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of the outputs and the number of examples."""
    return model(x).sum(), len(x)


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, shards: int
) -> None:
    """Do the arithmetic of one step, and nothing else."""
    for x in batch.tensor_split(shards):
        model(x).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(len(batch))
    optimizer.step()
    optimizer.zero_grad()


def time_each(job: dict[str, int], step: Callable[[], object]) -> list[float]:
    """Return the seconds of each timed step."""
    for _ in range(job["warmup_steps"]):
        step()
    seconds = []
    for _ in range(job["steps"]):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
