"""Independent products on two devices: one device after the other, or both at the same time."""

from __future__ import annotations

import time
from typing import Any

import torch

from evenstep.reproduce.engine.common import DEVICES, Job, open_contender, run


def measure(job: Job) -> dict[str, Any]:
    """Return the seconds of `count` products on each device."""
    inputs = {device: torch.rand(job["size"], job["size"]) for device in DEVICES}
    with open_contender(job) as engine:
        for device, x in inputs.items():
            engine.submit(torch.mm, x, x, device=device)
        engine.waitall()
        began = time.perf_counter()
        results = []
        for device, x in inputs.items():
            results += [engine.submit(torch.mm, x, x, device=device) for _ in range(job["count"])]
            if job["way"] == "apart":
                engine.waitall()
        engine.waitall()
        return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    run(measure)
