"""Hugging Face's Trainer, and evenstep's EvenTrainer, as contenders with loops of their own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from evenstep.bench import workload
from evenstep.bench.workload import Job, Stopwatch, Training, Workload


@contextlib.contextmanager
def trainer(job: Job) -> Iterator[Training]:
    """Prepare `transformers.Trainer`; with library "even_trainer", evenstep's class of it.

    After "Trainer" (https://huggingface.co/docs/transformers/trainer): a model that returns its
    loss, `TrainingArguments`, a data set of dicts, the loop of the library. Several processes come
    from torchrun, each with its part of the batch; EvenTrainer has devices instead.
    """
    import transformers

    is_even = job.library == "even_trainer"
    torch.set_num_threads(job.threads)
    network = workload.make_network(job)
    stages = _Stages(job)

    class Timed(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stages.on_step(state.global_step)

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
        library = _even_trainer(job) if is_even else transformers.Trainer
        made = library(
            model=_WithLoss(workload.find_workload(job.network), network),
            args=args,
            train_dataset=_Dicts(workload.make_dataset(job)),
            optimizers=(workload.make_optimizer(job, network), None),
            callbacks=[Timed()],
        )

        def loop() -> Mapping[str, float]:
            made.train()
            return stages.timing

        yield Training(
            model=network,
            loop=loop,
            is_reporting=made.is_world_process_zero(),
            facts=lambda: {"processes": args.world_size},
        )


def _even_trainer(job: Job) -> Any:
    from evenstep.integrations.transformers import EvenTrainer

    def make(**arguments: Any) -> EvenTrainer:
        devices = [f"cpu:{number}" for number in range(job.workers)]
        return EvenTrainer(**arguments, devices=devices, shards=job.shards)

    return make


class _Stages:
    """Starts a stopwatch after the warm-up and reads it after the last step."""

    def __init__(self, job: Job) -> None:
        self._warmup_steps, self._steps = job.warmup_steps, job.warmup_steps + job.steps
        self._watch: Stopwatch | None = None
        self.timing: dict[str, float] = {}

    def on_step(self, done: int) -> None:
        """Note that so many steps are done."""
        if done == self._warmup_steps:
            self._watch = Stopwatch()
        elif done == self._steps and self._watch is not None:
            self.timing = self._watch.stop()


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
