"""The libraries that `evenstep bench` compares, each training as its documentation shows it.

`measure` runs in a fresh process, and trains with one of them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

import evenstep
from evenstep.bench import workload
from evenstep.bench.workload import Job, Stopwatch, Training, Workload
from evenstep.bench.workload.job import Batch
from evenstep.data import Loader
from evenstep.profiling.accounting import since, together


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
def transformers_trainer(job: Job) -> Iterator[Training]:
    """Prepare `transformers.Trainer`; with library "even_trainer", evenstep's class of it.

    After "Trainer" (https://huggingface.co/docs/transformers/trainer): a model that returns its
    loss, `TrainingArguments`, a data set of dicts, the loop of the library. Several processes come
    from torchrun, each with its part of the batch; EvenTrainer has devices instead.
    """
    import transformers

    is_even = job.library == "even_trainer"
    torch.set_num_threads(job.threads)
    network, measured = workload.make_network(job), dict[str, float]()

    class Timed(transformers.TrainerCallback):
        """Starts a stopwatch after the warm-up, and reads it after the last step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == job.warmup_steps:
                self.watch = Stopwatch()
            elif state.global_step == job.warmup_steps + job.steps:
                measured.update(self.watch.stop())

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=job.warmup_steps + job.steps,
            per_device_train_batch_size=job.examples // (1 if is_even else job.workers),
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,  # the model names none
            ddp_backend="gloo" if torch.distributed.is_torchelastic_launched() else None,
        )
        library: Any = transformers.Trainer
        more: dict[str, Any] = {}
        if is_even:
            from evenstep.integrations.transformers import EvenTrainer

            library, more = EvenTrainer, {"devices": job.devices, "shards": job.shards}
        trainer = library(
            model=_WithLoss(workload.find_workload(job.network), network),
            args=args,
            train_dataset=_Dicts(workload.make_dataset(job)),
            optimizers=(workload.make_optimizer(job, network), None),
            callbacks=[Timed()],
            **more,
        )

        def loop() -> Mapping[str, float]:
            trainer.train()
            return measured

        yield Training(
            model=network,
            loop=loop,
            is_reporting=trainer.is_world_process_zero(),
            facts=lambda: {"processes": args.world_size},
        )


class _WithLoss(nn.Module):
    """A network that gets a batch by the names of its tensors, and returns its loss."""

    def __init__(self, kind: Workload, network: nn.Module) -> None:
        super().__init__()
        self.kind, self.network = kind, network

    def forward(
        self, num_items_in_batch: torch.Tensor | None = None, **batch: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        total, labels = self.kind.objective(self.network, *batch.values())
        return {"loss": total / (labels if num_items_in_batch is None else num_items_in_batch)}


class _Dicts(Dataset[dict[str, torch.Tensor]]):
    """A data set whose examples are dicts; the last tensor is called "labels"."""

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        *inputs, labels = self._tensors[number]
        named = {f"input_{place}": tensor for place, tensor in enumerate(inputs)}
        return {**named, "labels": labels}


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
        loss=None if is_text else nn.CrossEntropyLoss(),
        objective=kind.objective if is_text else None,
        devices=1 if has_processes else job.devices,
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
        shares = []  # before and after the timed steps

        def synchronize() -> None:
            trainer.waitall()
            shares.append(trainer.shares())
            if has_processes:
                distributed.barrier()

        def facts() -> dict[str, Any]:
            timed = [since(early, late) for early, late in zip(*shares, strict=True)]
            return {
                "busy_s": [own.compute_s + own.sum_s + own.update_s for own in timed],
                "spent_s": together(timed).seconds,
                "memory_format": trainer.experiment.memory_format,
            }

        yield Training(
            model=model,
            step=trainer.step,
            batches=_loaded(trainer, job)
            if job.loads
            else workload.in_memory(workload.make_loader(job)),
            synchronize=synchronize,
            is_reporting=not has_processes or distributed.get_rank() == 0,
            facts=facts,
        )
    if has_processes:
        distributed.destroy_process_group()


def _loaded(trainer: evenstep.Trainer, job: Job) -> Iterator[Batch]:
    """Yield batches that a loader makes during training, epoch after epoch."""
    loader = Loader(workload.make_dataset(job), job.examples)
    while True:
        yield from trainer.epoch(loader)


LIBRARIES: dict[str, Callable[[Job], contextlib.AbstractContextManager[Training]]] = {
    "plain": plain,
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
    "transformers": transformers_trainer,
    "even_trainer": transformers_trainer,
    "evenstep": evenstep_trainer,
    "processes": evenstep_trainer,
}


def measure(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Train as a job says; return times, speed, facts, and how far the weights moved.

    Contenders that did the same work moved the weights by the same distance, up to rounding
    (unless the network has batch normalization or dropout). Of several processes, one returns it.
    """
    job = Job(**fields)
    with LIBRARIES[job.library](job) as training:
        timing = training.time(job)
        if not training.is_reporting:
            return None
        initial = workload.make_network(job).parameters()
        moved = [
            (trained.detach() - first.detach()).double().norm()
            for trained, first in zip(training.model.parameters(), initial, strict=True)
        ]
        return {
            **timing,
            "examples_per_s": job.steps * job.examples / timing["seconds"],
            "weights_moved": torch.stack(moved).norm().item(),
            "torch_threads": torch.get_num_threads(),
            **training.facts(),
        }
