"""Times training steps with any revision of evenstep; uses nothing but its public API."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import evenstep


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return the median milliseconds of a step."""
    torch.manual_seed(0)
    model: nn.Module = getattr(evenstep.models, job["network"])()
    shape = (784,) if job["network"] == "mlp" else (1, 28, 28)
    batch = torch.randn(job["examples"], *shape), torch.randint(10, (job["examples"],))
    given = model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    devices = [f"cpu:{number}" for number in range(job["devices"])]
    experiment = evenstep.Experiment(batch_norm=job["batch_norm"])
    times_ms = []
    with evenstep.Trainer(*given, devices=devices, experiment=experiment) as trainer:
        for _ in range(job["warmup_steps"] + job["steps"]):
            began_s = time.perf_counter()
            trainer.step(*batch)
            times_ms.append(1e3 * (time.perf_counter() - began_s))
    return {"median_ms": statistics.median(times_ms[job["warmup_steps"] :])}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
