"""The libraries that `evenstep bench` compares, each training as its documentation shows it.

`python -m evenstep.bench.contenders JOB` trains with one of them and prints its speed as JSON.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import evenstep
from evenstep.bench import hugging_face, workload
from evenstep.bench.workload import Job, Training
from evenstep.bench.workload.job import Batch
from evenstep.data import Loader
from evenstep.profiling.accounting import DeviceShares, since, together


@contextlib.contextmanager
def plain(job: Job) -> Iterator[Training]:
    """Prepare a plain PyTorch loop in one process, with `threads` intra-op threads.

    With channels-last, model and input are both converted, as in torch's tutorial "Channels Last
    Memory Format in PyTorch".
    """
    torch.set_num_threads(job.threads)
    model = workload.make_network(job, in_format=True)
    step = workload.make_step(job, model, workload.make_optimizer(job, model))
    yield Training(model=model, step=step, batches=workload.in_memory(workload.make_loader(job)))


@contextlib.contextmanager
def ddp(job: Job) -> Iterator[Training]:
    """Prepare DistributedDataParallel over gloo, under torchrun, with one thread per process.

    After `multigpu_torchrun.py` of the tutorial series "Distributed Data Parallel in PyTorch"
    (https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html): a process group,
    a DistributedSampler, `DistributedDataParallel(model)`, and the loop unchanged.
    """
    distributed.init_process_group(backend="gloo")
    sampler: DistributedSampler[Any] = DistributedSampler(workload.make_dataset(job), shuffle=False)
    loader = workload.make_loader(job, distributed.get_world_size(), sampler)
    model = DistributedDataParallel(workload.make_network(job, in_format=True))
    yield Training(
        model=model,
        step=workload.make_step(job, model, workload.make_optimizer(job, model)),
        batches=workload.in_memory(loader),
        synchronize=distributed.barrier,
        is_reporting=distributed.get_rank() == 0,
    )
    distributed.destroy_process_group()


@contextlib.contextmanager
def accelerate(job: Job) -> Iterator[Training]:
    """Prepare Hugging Face Accelerate on CPU processes.

    After "Launching Accelerate scripts"
    (https://huggingface.co/docs/accelerate/basic_tutorials/launch) and "Migrating your code to
    Accelerate": `prepare` for model, optimizer and data loader, and `accelerator.backward` for
    `loss.backward`. The documentation starts several CPU processes with mpirun or torchrun;
    torchrun is used here because it needs no MPI.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = workload.make_network(job)
    loader = workload.make_loader(job, accelerator.num_processes)
    prepared = accelerator.prepare(model, workload.make_optimizer(job, model), loader)
    model, optimizer, loader = prepared
    yield Training(
        model=model,
        step=workload.make_step(job, model, optimizer, accelerator.backward),
        batches=workload.in_memory(loader),
        synchronize=accelerator.wait_for_everyone,
        is_reporting=accelerator.is_main_process,
        facts=lambda: {"processes": accelerator.num_processes},
    )
    accelerator.end_training()


@contextlib.contextmanager
def fabric(job: Job) -> Iterator[Training]:
    """Prepare Lightning Fabric on CPU processes (DDP over gloo), which it starts itself.

    After "Convert PyTorch code to Fabric"
    (https://lightning.ai/docs/fabric/stable/fundamentals/convert.html): `Fabric(...)`, `launch`,
    `setup`, `setup_dataloaders`, and `fabric.backward` for `loss.backward`.
    """
    from lightning_fabric import Fabric

    lightning = Fabric(accelerator="cpu", strategy="ddp", devices=job.workers)
    lightning.launch()
    model = workload.make_network(job)
    model, optimizer = lightning.setup(model, workload.make_optimizer(job, model))
    loader: Any = lightning.setup_dataloaders(workload.make_loader(job, lightning.world_size))
    yield Training(
        model=model,
        step=workload.make_step(job, model, optimizer, lightning.backward),
        batches=workload.in_memory(loader),
        synchronize=lightning.barrier,
        is_reporting=lightning.is_global_zero,
        facts=lambda: {"processes": lightning.world_size},
    )


@contextlib.contextmanager
def evenstep_trainer(job: Job) -> Iterator[Training]:
    """Prepare evenstep, as its README shows it.

    Library "evenstep" is one process with `workers` CPU devices, library "processes" several
    processes under torchrun with one device each. The result includes where the time of the devices
    of this process went.
    """
    has_processes = job.library == "processes"
    if has_processes:
        distributed.init_process_group(backend="gloo")  # for the rank and the barrier
    model, kind = workload.make_network(job), workload.find_workload(job.network)
    is_text = kind.make_examples is not None
    with evenstep.Trainer(
        model,
        workload.make_optimizer(job, model),
        loss=None if is_text else torch.nn.CrossEntropyLoss(),
        objective=kind.objective if is_text else None,
        devices=1 if has_processes else [f"cpu:{number}" for number in range(job.workers)],
        max_in_flight=job.max_in_flight,
        experiment=evenstep.Experiment(
            shards=job.shards,
            memory_format=job.memory_format,
            precision=job.precision,
            threads=job.threads,
            compile=job.hybridize,
            batch_norm=job.batch_norm,
        ),
    ) as trainer:
        shares: list[tuple[DeviceShares, ...]] = []

        def synchronize() -> None:
            trainer.waitall()
            shares.append(trainer.shares())
            if has_processes:
                distributed.barrier()

        in_memory = None if job.loads else workload.in_memory(workload.make_loader(job))
        yield Training(
            model=model,
            step=trainer.step,
            batches=in_memory or _loaded(trainer, job),
            synchronize=synchronize,
            is_reporting=not has_processes or distributed.get_rank() == 0,
            facts=lambda: _spent(trainer, shares),
        )
    if has_processes:
        distributed.destroy_process_group()


LIBRARIES: dict[str, Callable[[Job], contextlib.AbstractContextManager[Training]]] = {
    "plain": plain,
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
    "evenstep": evenstep_trainer,
    "processes": evenstep_trainer,
    "transformers": hugging_face.trainer,
    "even_trainer": hugging_face.trainer,
}


def _spent(trainer: evenstep.Trainer, shares: list[tuple[DeviceShares, ...]]) -> dict[str, Any]:
    timed = [since(early, late) for early, late in zip(*shares, strict=True)]
    return {
        "busy_s": [own.compute_s + own.sum_s + own.update_s for own in timed],
        "spent_s": together(timed).seconds,
        "memory_format": trainer.experiment.memory_format,
    }


def _loaded(trainer: evenstep.Trainer, job: Job) -> Iterator[Batch]:
    """Yield batches that a loader makes during training, epoch after epoch."""
    loader = Loader(workload.make_dataset(job), job.examples)
    while True:
        yield from trainer.epoch(loader)


if __name__ == "__main__":
    workload.run(LIBRARIES)
