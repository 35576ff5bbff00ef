"""evenstep: one process, `workers` CPU devices, V shards, as its README says."""

from __future__ import annotations

import torch

import evenstep
from contenders.workload import (
    make_loader,
    make_network,
    make_optimizer,
    read_job,
    report,
    time_steps,
)


def main() -> None:
    """Train, and print the line, with the busy seconds of each device in the timed steps."""
    job = read_job()
    model = make_network(job)
    with evenstep.Trainer(
        model,
        make_optimizer(model),
        loss=torch.nn.CrossEntropyLoss(),
        devices=[f"cpu:{number}" for number in range(job.workers)],
        shards=job.shards,
        memory_format=job.memory_format,
        precision=job.precision,
        threads=job.threads,
        max_in_flight=job.max_in_flight,
    ) as trainer:
        opened: list[list[float]] = []

        def meet() -> None:
            trainer.waitall()
            opened.append(trainer.busy_s)

        timing = time_steps(job, list(make_loader(job)), trainer.step, meet)
    before, after = opened
    busy_s = [late - early for early, late in zip(before, after, strict=True)]
    report(job, timing, model, busy_s=busy_s, memory_format=trainer.experiment.memory_format)


if __name__ == "__main__":
    main()
