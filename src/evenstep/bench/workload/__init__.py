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
from evenstep.bench.workload.timing import Stopwatch, Training, each_ms, time_steps

__all__ = [
    "BATCHES",
    "Job",
    "Stopwatch",
    "Training",
    "Workload",
    "each_ms",
    "find_workload",
    "in_memory",
    "make_dataset",
    "make_loader",
    "make_network",
    "make_optimizer",
    "make_step",
    "time_steps",
]
