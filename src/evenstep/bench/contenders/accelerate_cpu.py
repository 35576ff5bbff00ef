"""Hugging Face Accelerate on CPU processes, as its documentation says.

After "Launching Accelerate scripts" (https://huggingface.co/docs/accelerate/basic_tutorials/launch)
and "Migrating your code to Accelerate": `prepare` for model, optimizer and data loader,
`accelerator.backward` for `loss.backward`. Its documentation starts several CPU processes with
mpirun or with torchrun; this machine has no MPI, so torchrun it is.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
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
    accelerator = Accelerator(cpu=True)
    model = make_network(job)
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model), make_loader(job, accelerator.num_processes)
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()

    timing = time_steps(job, again_and_again(loader), step, accelerator.wait_for_everyone)
    if accelerator.is_main_process:
        report(job, timing, model, processes=accelerator.num_processes)
    accelerator.end_training()


if __name__ == "__main__":
    main()
