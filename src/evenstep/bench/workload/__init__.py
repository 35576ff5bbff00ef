"""What all contenders share: job, network, batches, training step, timed loop, result."""

from evenstep.bench.workload.job import (
    BATCHES,
    Job,
    in_memory,
    make_dataset,
    make_loader,
    make_network,
    make_optimizer,
    make_step,
)
from evenstep.bench.workload.kinds import Workload, find_workload
from evenstep.bench.workload.timing import Stopwatch, Training, run, time_steps

__all__ = [
    "BATCHES",
    "Job",
    "Stopwatch",
    "Training",
    "Workload",
    "find_workload",
    "in_memory",
    "make_dataset",
    "make_loader",
    "make_network",
    "make_optimizer",
    "make_step",
    "run",
    "time_steps",
]
