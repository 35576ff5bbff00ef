"""Measures a training step on one device, and what the machine adds to it on more."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep.bench import workload
from evenstep.bench.workload import Job
from evenstep.cli.machine.facts import memory_bytes
from evenstep.devices import accelerator, as_device, gpu_count, usable_cores
from evenstep.errors import InputError
from evenstep.nn.slice_runners import (
    ONE_BY_ONE,
    Argument,
    Exchanged,
    Result,
    SliceFunction,
    SlicingDevices,
    runner_here,
)
from evenstep.options import Experiment
from evenstep.planning import Machine, Work, facts_of
from evenstep.planning.traced import work_of_events
from evenstep.profiling.reader import events_of_trace
from evenstep.training.trainer import Trainer

_MOST_BESIDE = 4  # devices of which it is measured how they slow each other down
_COPIED_NBYTES = 64 << 20


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the work of a job as a JSON object, and what several threads cost each other.

    Args:
        job: the fields of a `Job`; "begins_s" (optional), a time of `time.time` to wait for, so
            that several processes measure at the same time; and "beside" (optional), up to how
            many devices slow each other down.
    """
    fields = {**job}
    begins_s, beside = fields.pop("begins_s", 0.0), fields.pop("beside", 1)
    one = Job(**fields)
    work = measured_work(one, wait=lambda: time.sleep(max(0.0, begins_s - time.time())))
    more = {}
    if beside > 1:
        more = {"slowdown": slowdown_of_threads(one, beside), "meeting_s": meeting_s()}
    return {"work": dataclasses.asdict(work), **more}


def measured_work(job: Job, wait: Callable[[], object] = lambda: None) -> Work:
    """Train for some steps on one device, and return the work of a step."""
    model = workload.make_network(job)
    kind = workload.find_workload(job.network)
    optimizer = workload.make_optimizer(job, model)
    experiment = Experiment(
        shards=job.shards,
        memory_format=job.memory_format,
        precision=job.precision,
        threads=job.threads,
    )
    batches = workload.in_memory(workload.make_loader(job))
    device = "cuda:0" if gpu_count() else "cpu:0"
    with Trainer(
        model, optimizer, objective=kind.objective, devices=device, experiment=experiment
    ) as trainer:
        for _ in range(job.warmup_steps):
            trainer.step(*next(batches))
        trainer.waitall()
        wait()
        for _ in range(job.steps):
            trainer.step(*next(batches))
        trainer.waitall()
        facts: dict[str, Any] = {**facts_of(model.parameters(), optimizer, job.examples)}
        events = events_of_trace(trainer.trace.to_json())
    kept = [e for e in events if e.step is None or e.step >= job.warmup_steps]
    work = work_of_events(kept, name=job.network, device=device, **facts)
    held = activation_nbytes(job)
    sliced = sliced_part(job, work.usual_s) if job.slices else {}
    return dataclasses.replace(work, activation_nbytes=held, load_s=0.0, **sliced)


class _TimedSlices:
    """Computes slices one after another, and counts how often and for how long."""

    def __init__(self) -> None:
        self.seconds, self.meetings = 0.0, 0

    def run(self, function: SliceFunction, arguments: Sequence[Sequence[Argument]]) -> list[Result]:
        began_s = time.perf_counter()
        found = ONE_BY_ONE.run(function, arguments)
        self.seconds += time.perf_counter() - began_s
        self.meetings += len(arguments) > 1
        return found


def sliced_part(job: Job, shard_s: float, passes: int = 5) -> dict[str, Any]:
    """Return the fields of a `Work` that say what of a shard is in slices.

    Raises:
        InputError: the devices are GPUs.
    """
    if gpu_count():
        raise InputError(
            "got --slices and GPUs: a plan has slices for CPU devices only, since nobody measured "
            "what GPUs send each other in each layer"
        )
    model = workload.make_network(job)
    shares, meetings = [], 0
    for _ in range(passes):
        timed = _TimedSlices()
        outside = runner_here.set(timed)
        began_s = time.perf_counter()
        _first_loss(job, model, lambda tensor: tensor)[0].backward()
        shares.append(timed.seconds / (time.perf_counter() - began_s))
        runner_here.reset(outside)
        meetings = timed.meetings
    share = statistics.median(shares[1:])
    return {"slices": job.slices, "sliced_s": share * shard_s, "meetings": meetings}


def meeting_s(meetings: int = 500) -> float:
    """Return how long a thread takes to let another compute a slice of nothing."""
    runner = SlicingDevices({0: as_device("cpu:0"), 1: as_device("cpu:1")}, Exchanged())
    helper = threading.Thread(target=runner.help, args=(1,))
    helper.start()
    times_s = []
    try:
        for _ in range(meetings):
            began_s = time.perf_counter()
            runner.run(lambda number: (None,), [(), ()])
            times_s.append(time.perf_counter() - began_s)
    finally:
        runner.stop()
        helper.join()
    return statistics.median(times_s)


def activation_nbytes(job: Job) -> int:
    """Return the bytes that a shard keeps for its backward pass, without parameters."""
    model = workload.make_network(job)
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    loss, _ = _first_loss(job, model, keep)
    found = sum(held.values())
    del loss  # until here, all storages are alive and have addresses of their own
    return found


def slowdown_of_threads(job: Job, most: int) -> tuple[float, ...]:
    """Return how many times longer a shard takes while 1 to `most` threads compute one each.

    Each thread has a model of its own, so that only the machine and the interpreter slow them down.
    """
    torch.set_num_threads(job.threads)
    models = [workload.make_network(job) for _ in range(most)]
    found = []
    rounds: dict[int, list[float]] = {count: [] for count in range(1, most + 1)}
    for _ in range(5):
        for count in rounds:
            rounds[count].append(_together_s(job, models[:count]))
    for count in rounds:
        ratios = [own / one for own, one in zip(rounds[count], rounds[1], strict=True)]
        found.append(max(1.0, statistics.median(ratios)))
    return tuple(found)


def _together_s(job: Job, models: list[torch.nn.Module], passes: int = 4) -> float:
    """Return the median seconds of a shard while a thread for each model computes some."""
    times_s: list[float] = []
    ready = threading.Barrier(len(models))
    batches = workload.make_loader(job)
    shard = [tensor[: max(1, job.examples // job.shards)] for tensor in next(iter(batches))]
    kind = workload.find_workload(job.network)

    def compute(model: torch.nn.Module) -> None:
        torch.set_num_threads(job.threads)
        ready.wait()
        for _ in range(passes):
            began_s = time.perf_counter()
            kind.objective(model, *shard)[0].backward()
            times_s.append(time.perf_counter() - began_s)

    threads = [threading.Thread(target=compute, args=(model,)) for model in models]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return statistics.median(times_s)


def fixed_s(job: Job, work: Work) -> float:
    """Return the part of a shard's seconds that does not depend on its examples.

    It is where the line through the times of two sizes of shards begins.
    """
    size = work.examples / work.shards
    if size < 2:
        return 0.0
    smaller = dataclasses.replace(job, shards=min(job.examples, 4 * job.shards), steps=4)
    short = measured_work(smaller)
    other = short.examples / short.shards
    slope = (work.usual_s - short.usual_s) / (size - other)
    return min(max(0.0, work.usual_s - slope * size), 0.9 * short.usual_s)


def copied_bytes_per_s(copies: int = 5) -> float:
    """Return what one thread copies in a second."""
    source = torch.ones(_COPIED_NBYTES // 4)
    target = torch.empty_like(source)
    times_s = []
    for _ in range(copies):
        began_s = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - began_s)
    return _COPIED_NBYTES / statistics.median(times_s)


def measured_machine(job: Job) -> Machine:
    """Return what this machine adds to a step on more than one of its devices."""
    if count := gpu_count():
        _, memory = accelerator.memory_nbytes(torch.device("cuda:0"))
        return Machine(devices=count, has_own_memory=True, memory_nbytes=memory)
    cores = usable_cores()
    return Machine(
        devices=cores,
        slowdown=slowdown_of_threads(job, min(cores, _MOST_BESIDE)),
        copied_bytes_per_s=copied_bytes_per_s() / min(2, cores),
        meeting_s=meeting_s() if cores > 1 else 0.0,
        memory_nbytes=memory_bytes()[0],
    )


def _first_loss(
    job: Job, model: torch.nn.Module, keep: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, int]:
    shard = [
        tensor[: max(1, job.examples // job.shards)]
        for tensor in next(iter(workload.make_loader(job)))
    ]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return workload.find_workload(job.network).objective(model, *shard)
