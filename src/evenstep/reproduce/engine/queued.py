"""When `submit` of a product returns, and when the product is computed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import evenstep
from evenstep.reproduce.engine.common import DEVICES, Job, run


def measure(job: Job) -> dict[str, Any]:
    """Return the median seconds, over the repeats, until `submit` returned and until the result."""
    x = torch.rand(job["size"], job["size"])
    queued, finished = [], []
    with evenstep.Engine(devices=DEVICES) as engine:
        for device in DEVICES:
            engine.submit(torch.mm, x, x, device=device)
        engine.waitall()
        for _ in range(job["repeats"]):
            began = time.perf_counter()
            y = engine.submit(torch.mm, x, x)
            queued.append(time.perf_counter() - began)
            y.wait_to_read()
            finished.append(time.perf_counter() - began)
    return {"queued_s": statistics.median(queued), "finished_s": statistics.median(finished)}


if __name__ == "__main__":
    run(measure)
