"""Where the time of a step goes: torch's profiler over a few steps on one core, in one thread.

`{"way": "whole"}` is a plain loop, `"shards"` a plain loop that accumulates over the shards, and
`"evenstep"` the trainer with its inline lanes: the same work as on one device, in this thread, so
that the profiler sees all of it. `"hybridized"` is the trainer with compiled shards.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch._inductor.config
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import evenstep
from evenstep.bench.workload import Job, make_loader, make_network, make_optimizer
from evenstep.engine import InlineLanes

Step = Callable[[torch.Tensor, torch.Tensor], object]


def main() -> None:
    """Time steps without the profiler, then profile as many; print the line."""
    arguments = json.loads(sys.argv[1])
    way = arguments.pop("way")
    job = Job(**arguments)
    torch.set_num_threads(1)
    if way in ("evenstep", "hybridized"):
        torch._inductor.config.cpp.enable_kernel_profile = True
        model = make_network(job)
        with evenstep.Trainer(
            model,
            make_optimizer(model),
            loss=torch.nn.CrossEntropyLoss(),
            devices=1,
            shards=job.shards,
            lanes=InlineLanes,
            hybridize=way == "hybridized",
        ) as trainer:
            line = measure(job, trainer.step)
    else:
        line = measure(job, plain_step(job, shards=job.shards if way == "shards" else 1))
    print(json.dumps(line))


def plain_step(job: Job, shards: int) -> Step:
    """Return the step of a plain loop that accumulates the gradients of `shards` shards."""
    model = make_network(job).to(memory_format=torch.channels_last)
    optimizer = make_optimizer(model)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        for x, y in zip(images.tensor_split(shards), labels.tensor_split(shards), strict=True):
            x = x.to(memory_format=torch.channels_last)
            (F.cross_entropy(model(x), y, reduction="sum") / len(images)).backward()
        optimizer.step()

    return step


def measure(job: Job, step: Step) -> dict[str, object]:
    """Return a step's milliseconds, and those of each operator in itself: medians over the steps.

    Every step has a profile of its own. In a longer one the growing list of events takes the place
    of freed activations in the heap, and the page faults of their new place are what is measured.
    """
    batches = itertools.cycle(list(make_loader(job)))
    for _ in range(job.warmup_steps):
        step(*next(batches))
    milliseconds = [_milliseconds(lambda: step(*next(batches))) for _ in range(job.steps)]
    profiled, operators = [], []
    for _ in range(job.steps):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            profiled.append(_milliseconds(lambda: step(*next(batches))))
        operators.append(
            {event.key: event.self_cpu_time_total / 1e3 for event in profiler.key_averages()}
        )
    return {
        "step_ms": statistics.median(milliseconds),
        "profiled_step_ms": statistics.median(profiled),
        "operators_ms": {
            name: statistics.median(one.get(name, 0.0) for one in operators)
            for name in sorted(set().union(*operators))
        },
        "all_operators_ms": statistics.median(sum(one.values()) for one in operators),
    }


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
