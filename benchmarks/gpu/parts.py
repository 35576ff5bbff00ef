"""The parts: each is a function of the accelerator's type that returns figures for the JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import distributed, nn

import evenstep
from evenstep.bench import workload
from evenstep.bench.workload import Job
from evenstep.bench.workload.kinds import TEXT
from gpu import place

Figures = Mapping[str, Any]
Run = Callable[[int], object]
"""Takes so many steps, and waits for the last."""

ROUNDS, WARMUP = 5, 3
TOLERANCE = 2e-2
"""The most by which losses of a few steps may differ from a CPU's, relatively."""


def measure(job: Mapping[str, Any]) -> Figures:
    """Return what a part finds."""
    place.prepare(job["device"])
    return PARTS[job["part"]](job["device"], quick=job["quick"])


# ---- trainings


def job_of(network: str, examples: int, size: int = 0, precision: str = "fp32") -> Job:
    """Return what is trained; images of one channel have a size, text has none.

    Args:
        network: the network.
        examples: the rows of a batch.
        size: the height and the width of an image.
        precision: "fp32", "bf16", or "tf32" (single precision whose products may be rounded).
    """
    shape, few = (1, size, size), {"warmup_steps": WARMUP, "steps": 20}
    return Job(network=network, examples=examples, shape=shape, precision=precision, **few)


LENET = job_of("lenet", 256, 28)
RESNET = job_of("resnet18", 256, 64)
GPT = job_of("chargpt", 64)
SMALL_GPT = job_of("chargpt-small", 12)


def _prepared(job: Job, quick: bool) -> Job:
    """Return the job, with small batches and few steps if it is to be quick; set the rounding."""
    rounds = job.precision == "tf32"
    torch.set_float32_matmul_precision("high" if rounds else "highest")
    torch.backends.cudnn.allow_tf32 = rounds
    if not quick:
        return job
    network = {"chargpt": "chargpt-small"}.get(job.network, job.network)
    few = {"examples": 8, "shape": (1, 28, 28), "warmup_steps": 1, "steps": 1}
    return dataclasses.replace(job, network=network, **few)


def _made(job: Job, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network, with the same weights each time, and its optimizer."""
    model = workload.make_network(job)
    if job.network not in TEXT:
        model.eval()(torch.zeros(2, *job.shape))  # lazy layers
    model.train().to(device)
    return model, workload.make_optimizer(job, model)


def _batches(job: Job) -> Iterator[Any]:
    return workload.in_memory(workload.make_loader(job))


def _trainer(job: Job, devices: Any, shards: int = 8, **options: Any) -> evenstep.Trainer:
    precision: Any = "bf16" if job.precision == "bf16" else "fp32"
    objective = workload.find_workload(job.network).objective
    experiment = evenstep.Experiment(shards=shards, precision=precision)
    options = {"objective": objective, "experiment": experiment, **options}
    return evenstep.Trainer(*_made(job), devices=devices, **options)


@contextlib.contextmanager
def _plain(
    job: Job, device: str, wrap: Callable[[nn.Module], Any] = lambda model: model
) -> Iterator[Run]:
    model, optimizer = _made(job, f"{device}:0")
    model, batches, loss_of = wrap(model), _batches(job), workload.find_workload(job.network).loss

    def run(steps: int) -> None:
        for given in itertools.islice(batches, steps):
            batch = [one.to(f"{device}:0", non_blocking=True) for one in given]
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=job.precision == "bf16"):
                loss = loss_of(model, *batch)
            loss.backward()
            optimizer.step()

    yield run


def _ddp(model: nn.Module) -> nn.Module:
    if not distributed.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
        distributed.init_process_group("nccl", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


@contextlib.contextmanager
def _evenstep(job: Job, device: str, shards: int, **options: Any) -> Iterator[Run]:
    batches = _batches(job)
    with _trainer(job, f"{device}:0", shards, **options) as trainer:

        def run(steps: int) -> None:
            for batch in itertools.islice(batches, steps):
                trainer.step(*batch)
            trainer.waitall()

        yield run


def _timed(run: Run, steps: int) -> float:
    torch.accelerator.synchronize()
    began_s = time.perf_counter()
    run(steps)
    torch.accelerator.synchronize()
    return time.perf_counter() - began_s


# ---- what must hold


def facts(device: str, *, quick: bool) -> Figures:
    """Return what the machine is."""
    return place.facts(device)


def tests(device: str, *, quick: bool) -> Figures:
    """Run the tests that are for an accelerator of any kind."""
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts="] + ["--accelerator"] * (device == place.EMULATED)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place.ROOT)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"holds": done.returncode == 0, "outcome": lines[-1], "failed": failed[:20]}


def sameness(job: Job, device: str, *, quick: bool) -> Figures:
    """Train on one device, again, on it listed twice, in flight, and on a CPU; compare."""
    job, steps, one = _prepared(job, quick), 3 if quick else 10, f"{device}:0"
    layouts: dict[str, dict[str, Any]] = {
        "one": {"devices": one},
        "again": {"devices": one},
        "twice": {"devices": [one, one]},
        "in flight": {"devices": one, "max_in_flight": 2},
    }
    count = torch.get_device_module(device).device_count()
    if count > 1:
        layouts["all"] = {"devices": [f"{device}:{number}" for number in range(count)]}
    prints, losses = {}, {}
    for name, layout in layouts.items():
        prints[name], losses[name] = _train(job, steps, layout)
    found: dict[str, Any] = {"holds": len({*prints.values()}) == 1, "fingerprints": prints}
    if job.examples <= 64 or job.network == "lenet":
        _, on_a_cpu = _train(job, 3, {"devices": "cpu:0"})
        pairs = zip(on_a_cpu, losses["one"], strict=False)
        found["from a CPU"] = max(abs(one / other - 1) for one, other in pairs)
        found["holds"] = found["holds"] and found["from a CPU"] < TOLERANCE
    return found


def _train(job: Job, steps: int, layout: Mapping[str, Any]) -> tuple[str, list[float]]:
    with _trainer(job, **layout) as trainer:
        handles = [trainer.step(*batch) for batch in itertools.islice(_batches(job), steps)]
        return trainer.fingerprint(), [*map(float, handles)]


def waits(device: str, *, quick: bool) -> Figures:
    """Count the blocking waits of the host in a step that checks nothing."""
    job, found = _prepared(SMALL_GPT, quick), []
    with _trainer(job, f"{device}:0") as trainer:
        for batch in itertools.islice(_batches(job), 7):
            with place.counted_waits(device) as counted:
                float(trainer.step(*batch))
            found += counted
    return {"waits": found, "holds": max(found[number] for number in (2, 4, 5, 6)) <= 2}


# ---- speed and memory


def speed(job: Job, device: str, *, quick: bool) -> Figures:
    """Time steps of a plain loop, a compiled one, DDP in one process, and evenstep."""
    job = _prepared(job, quick)
    contenders: dict[str, AbstractContextManager[Run]] = {"plain": _plain(job, device)}
    if device != place.EMULATED:  # which has neither a compiler nor collectives
        contenders["compiled"] = _plain(job, device, wrap=torch.compile)
        contenders["ddp"] = _plain(job, device, wrap=_ddp)
    for shards in (1, 2, 8):
        contenders[f"evenstep V={shards}"] = _evenstep(job, device, shards)
    contenders["evenstep V=2 in flight"] = _evenstep(job, device, 2, max_in_flight=2)
    found: dict[str, Any] = {}
    runs: dict[str, Run] = {}
    with ExitStack() as opened:
        for name, contender in contenders.items():
            run = _warmed_up(opened, contender, job.warmup_steps)
            if isinstance(run, str):
                found[name] = {"error": run}
            else:
                runs[name] = run
        rounds = 1 if quick else ROUNDS  # interleaved
        times = [{name: _timed(run, job.steps) / job.steps for name, run in runs.items()}
                 for _ in range(rounds)]  # fmt: skip
    for name in runs:
        own = [one[name] for one in times]
        found[name] = {
            "ms": [round(1e3 * one, 4) for one in own],
            "examples_per_s": round(job.examples / statistics.median(own), 1),
        }
    failed = [name for name, one in found.items() if "error" in one and name.startswith("evenstep")]
    size = {"examples": job.examples, "precision": job.precision}
    return {**size, "holds": not failed, "contenders": found}


def _warmed_up(opened: ExitStack, contender: AbstractContextManager[Run], steps: int) -> Run | str:
    """Return what takes a contender's steps, after some; its error if there is one."""
    try:
        run = opened.enter_context(contender)
        _timed(run, steps)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return run


def memory(job: Job, device: str, *, quick: bool) -> Figures:
    """Return the peak memory of tensors: of a plain loop, then of evenstep."""
    job, found = _prepared(job, quick), {}
    contenders = {"plain": _plain(job, device)}
    contenders |= {f"evenstep V={shards}": _evenstep(job, device, shards) for shards in (1, 8)}
    for name, contender in contenders.items():
        before = place.peak_bytes(device, reset=True)
        with contender as run:
            _timed(run, WARMUP)
            peak = place.peak_bytes(device)
        found[name] = None if peak is None or before is None else peak - before
    return {"peak_bytes": found}


def engine(device: str, *, quick: bool) -> Figures:
    """Copy results to the CPU while the next ones are computed (the book's section 13.3)."""
    size, count = (64, 8) if quick else (2_000, 50)
    one = f"{device}:0"
    x = torch.rand(size, size, device=one)
    found: dict[str, list[float]] = {"computing": [], "copying": [], "overlapped": []}
    with evenstep.Engine([one, "cpu:0"]) as runs:

        def compute(steps: int) -> list[Any]:
            results = [runs.submit(torch.mm, x, x, device=one) for _ in range(count)]
            if steps:
                runs.waitall()
            return results

        def copy(results: list[Any]) -> None:
            for handle in [runs.copy(result, "cpu:0") for result in results]:
                handle.wait_to_read()

        for _ in range(2 if quick else ROUNDS + 1):
            found["computing"].append(_timed(compute, 1))
            results = compute(1)
            found["copying"].append(_timed(lambda _, results=results: copy(results), 1))
            found["overlapped"].append(_timed(lambda _: copy(compute(0)), 1))
    return {"seconds": {name: statistics.median(times[1:]) for name, times in found.items()}}


def _named(name: str, function: Callable[..., Figures], **jobs: Job) -> dict[str, Any]:
    return {f"{name}.{key}": functools.partial(function, job) for key, job in jobs.items()}


PARTS: Mapping[str, Callable[..., Figures]] = {
    "facts": facts,
    "tests": tests,
    **_named("sameness", sameness, lenet=LENET, resnet18=RESNET, gpt=SMALL_GPT),
    "waits": waits,
    "overhead": functools.partial(speed, job_of("mlp", 64, 28)),  # nearly all is the host's
    "engine": engine,
    **_named("memory", memory, resnet18=RESNET, gpt=GPT),
    **_named("speed", speed, lenet=LENET),
    **_named("speed.gpt", speed, bf16=job_of("chargpt", 64, 0, "bf16")),
    **_named("speed.resnet18", speed, fp32=RESNET, bf16=job_of("resnet18", 256, 64, "bf16")),
    **_named("speed.resnet18", speed, tf32=job_of("resnet18", 256, 64, "tf32")),
    **_named("speed.gpt", speed, tf32=job_of("chargpt", 64, 0, "tf32")),
}
"""By name, in the order of their worth."""

NOT_QUICK = ("speed.resnet18.bf16",)
"""Parts that small sizes don't make quick: bf16 convolutions on a CPU that lacks bf16."""
