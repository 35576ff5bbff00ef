"""A plain PyTorch loop in one process, with `threads` intra-op threads.

The layout follows torch's "Channels Last Memory Format in PyTorch" tutorial: model and input are
both converted.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from evenstep.bench.workload import (
    again_and_again,
    laid_out,
    make_loader,
    make_network,
    make_optimizer,
    read_job,
    report,
    time_steps,
)


def main() -> None:
    """Train, and print the line."""
    job = read_job()
    torch.set_num_threads(job.threads)
    model = laid_out(make_network(job), job)
    optimizer = make_optimizer(model)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.to(memory_format=job.torch_format)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    timing = time_steps(job, again_and_again(make_loader(job)), step)
    report(job, timing, model)


if __name__ == "__main__":
    main()
