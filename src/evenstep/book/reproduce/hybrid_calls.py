"""The book's 1000 calls of a small network on one example: as it is, and hybridized."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import evenstep


def main() -> None:
    """Time both in turns, and print the line."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = (nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
    net = nn.Sequential(*hidden, nn.Linear(128, 2)).eval()
    x = torch.randn(1, 512)
    began = time.perf_counter()
    fast = evenstep.hybridize(net, x)
    found_s = time.perf_counter() - began
    eager_us, hybrid_us = [], []
    for _ in range(job["rounds"]):
        eager_us.append(timed(net, x, job["calls"]))
        hybrid_us.append(timed(fast, x, job["calls"]))
    print(
        json.dumps(
            {
                "eager_us": min(eager_us),
                "hybrid_us": min(hybrid_us),
                "way": fast.method.name,
                "ways_us": {method.name: method.call_us for method in fast.methods},
                "max_difference": fast.method.max_difference,
                "found_s": found_s,
            }
        )
    )


def timed(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, calls: int) -> float:
    """Return the microseconds of a call."""
    began = time.perf_counter()
    for _ in range(calls):
        call(x)
    return (time.perf_counter() - began) / calls * 1e6


if __name__ == "__main__":
    main()
