"""evenstep in several processes under torchrun, one CPU device each: the same script as for one."""

from __future__ import annotations

import torch
from torch import distributed

import evenstep
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
    distributed.init_process_group(backend="gloo")  # for the rank, and the barrier around the time
    model = make_network(job)
    with evenstep.Trainer(
        model,
        make_optimizer(model),
        loss=torch.nn.CrossEntropyLoss(),
        devices=1,
        shards=job.shards,
        memory_format=job.memory_format,
        max_in_flight=job.max_in_flight,
    ) as trainer:

        def meet() -> None:
            trainer.waitall()
            distributed.barrier()

        timing = time_steps(job, again_and_again(make_loader(job)), trainer.step, meet)
    if distributed.get_rank() == 0:
        report(job, timing, model, memory_format=trainer.experiment.memory_format)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
