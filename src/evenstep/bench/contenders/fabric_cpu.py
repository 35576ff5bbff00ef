"""Lightning Fabric on CPU processes (DDP over gloo), as its documentation says.

After "Convert PyTorch code to Fabric"
(https://lightning.ai/docs/fabric/stable/fundamentals/convert.html): `Fabric(...)`, `launch`,
`setup`, `setup_dataloaders`, and `fabric.backward` for `loss.backward`. Fabric starts the second
process itself.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric
from torch.nn import functional as F

from evenstep.bench.workload import (
    again_and_again,
    make_loader,
    make_network,
    make_optimizer,
    read_job,
    report,
    time_steps,
)


def main() -> None:
    """Train, and print the line in the first process."""
    job = read_job()
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=job.workers)
    fabric.launch()
    model = make_network(job)
    model, optimizer = fabric.setup(model, make_optimizer(model))
    loader: Any = fabric.setup_dataloaders(make_loader(job, fabric.world_size))

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()

    timing = time_steps(job, again_and_again(loader), step, fabric.barrier)
    if fabric.is_global_zero:
        report(job, timing, model, processes=fabric.world_size)


if __name__ == "__main__":
    main()
