"""evenstep: one process, `workers` CPU devices, V shards, as its README says."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import evenstep
from evenstep.bench.workload import (
    Batch,
    Job,
    again_and_again,
    make_dataset,
    make_loader,
    make_network,
    make_optimizer,
    read_job,
    report,
    time_steps,
)
from evenstep.data import Loader
from evenstep.profiling.accounting import DeviceShares, since, together


def main() -> None:
    """Train, and print the line, with where the devices' time went in the timed steps."""
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
        hybridize=job.hybridize,
        batch_norm=job.batch_norm,
    ) as trainer:
        told: list[tuple[DeviceShares, ...]] = []

        def meet() -> None:
            trainer.waitall()
            told.append(trainer.shares())

        batches = loaded(trainer, job) if job.loads else again_and_again(make_loader(job))
        timing = time_steps(job, batches, trainer.step, meet)
    timed = [since(early, late) for early, late in zip(*told, strict=True)]
    report(
        job,
        timing,
        model,
        busy_s=[own.compute_s + own.sum_s + own.update_s for own in timed],
        spent_s=together(timed).seconds,
        memory_format=trainer.experiment.memory_format,
    )


def loaded(trainer: evenstep.Trainer, job: Job) -> Iterator[Batch]:
    """Yield batches that are put together as they are needed, epoch after epoch."""
    loader = Loader(make_dataset(job), job.examples)
    while True:
        yield from trainer.epoch(loader)


if __name__ == "__main__":
    main()
