"""PyTorch DistributedDataParallel over gloo, under torchrun, as its documentation says.

After `multigpu_torchrun.py` of the tutorial series "Distributed Data Parallel in PyTorch"
(https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html): a process group, a
DistributedSampler, `DistributedDataParallel(model)`, and the loop unchanged. torchrun gives each
process one thread. With channels-last the model and the input are converted as in `plain.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from evenstep.bench.workload import (
    again_and_again,
    laid_out,
    make_dataset,
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
    distributed.init_process_group(backend="gloo")
    sampler: DistributedSampler[Any] = DistributedSampler(make_dataset(job), shuffle=False)
    loader = make_loader(job, distributed.get_world_size(), sampler)
    model = DistributedDataParallel(laid_out(make_network(job), job))
    optimizer = make_optimizer(model)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.to(memory_format=job.torch_format)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    timing = time_steps(job, again_and_again(loader), step, distributed.barrier)
    if distributed.get_rank() == 0:
        report(job, timing, model)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
