"""Times the book's 1000 calls of a small network on one example, eager and hybridized."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

import evenstep
from evenstep.bench import fresh


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shortest mean time per call, over `rounds` turns of `calls` calls each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = (nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
    net = nn.Sequential(*hidden, nn.Linear(128, 2)).eval()
    x = torch.randn(1, 512)
    began = time.perf_counter()
    fast = evenstep.hybridize(net, x)
    found_s = time.perf_counter() - began
    turns = [[call_us(one, x, job["calls"]) for one in (net, fast)] for _ in range(job["rounds"])]
    eager_us, hybrid_us = map(min, zip(*turns, strict=True))
    return {
        "eager_us": eager_us,
        "hybrid_us": hybrid_us,
        "way": fast.method.name,
        "ways_us": {method.name: method.call_us for method in fast.methods},
        "max_difference": fast.method.max_difference,
        "found_s": found_s,
    }


def call_us(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, calls: int) -> float:
    """Return the mean microseconds of a call."""
    return 1e6 * Timer("call(x)", globals={"call": call, "x": x}).timeit(calls).mean


if __name__ == "__main__":
    fresh.answer(measure)
