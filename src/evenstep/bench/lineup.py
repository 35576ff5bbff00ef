"""The contenders of `evenstep bench`: evenstep, a plain loop, DDP, Accelerate, Lightning Fabric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.bench import running
from evenstep.bench.running import Contender
from evenstep.bench.workload.kinds import TEXT
from evenstep.errors import counted


def side_by_side(job: Mapping[str, Any], workers: int) -> list[Contender]:
    """Return contenders that train the same: a plain loop, the peers, evenstep.

    Args:
        job: fields of `workload.Job` that all share.
        workers: number of processes or devices of those that use several.
    """
    is_text = job["network"] in TEXT
    return [
        plain(job, 1),
        plain(job, workers),
        *peers(job, workers),
        *(trainers(job, workers) if is_text else ()),
        devices(job, workers),
        *(() if is_text else [devices(job, workers, memory_format="channels_last")]),
        devices(job, workers, hybridize=True),
        processes(job, workers),
    ]


def scaling(job: Mapping[str, Any], counts: Sequence[int]) -> list[Contender]:
    """Return evenstep on each number of devices, with the same batch and with a growing one.

    Args:
        job: fields of `workload.Job`; `examples` is the batch size of the first count.
        counts: numbers of devices, in increasing order.
    """
    grown = [job["examples"] * count // counts[0] for count in counts]
    sizes = [(count, job["examples"]) for count in counts] + [*zip(counts, grown, strict=True)][1:]
    return [
        devices({**job, "examples": examples, "loads": True}, count) for count, examples in sizes
    ]


def peers(job: Mapping[str, Any], workers: int) -> list[Contender]:
    """Return DDP, with both memory formats for images, Accelerate, and Fabric."""
    memory_formats = ("contiguous",) if job["network"] in TEXT else ("contiguous", "channels_last")
    several = {**job, "workers": workers}
    return [
        *(ddp(job, workers, memory_format) for memory_format in memory_formats),
        accelerate(job, workers),
        _contender(
            "fabric",
            f"fabric.{workers}.contiguous",
            f"Lightning Fabric, {counted(workers, 'process')}, contiguous",
            several,
            threads=1,  # it starts its processes itself
            needs="lightning_fabric",
        ),
    ]


def accelerate(job: Mapping[str, Any], workers: int) -> Contender:
    """Return Hugging Face Accelerate."""
    key, label = f"accelerate.{workers}.contiguous", "Accelerate, {processes}, contiguous"
    return _launched("accelerate", key, label, job, workers, needs="accelerate")


def trainers(job: Mapping[str, Any], workers: int) -> list[Contender]:
    """Return Hugging Face's Trainer, with threads and with processes, and EvenTrainer."""
    label, shards = "Hugging Face's Trainer", job.get("shards", 8)
    needs = {"needs": "transformers"}
    with_threads = {**job, "threads": workers}
    return [
        _contender(
            "transformers",
            f"transformers.1.threads{workers}",
            f"{label}, {counted(workers, 'thread')}",
            with_threads,
            threads=workers,
            **needs,
        ),
        _launched(
            "transformers",
            f"transformers.{workers}",
            f"{label}, {{processes}}",
            job,
            workers,
            **needs,
        ),
        _contender(
            "even_trainer",
            f"even_trainer.{workers}.v{shards}",
            f"EvenTrainer, {counted(workers, 'device')}, V = {shards}",
            {**job, "workers": workers},
            **needs,
        ),
    ]


def plain(job: Mapping[str, Any], threads: int, memory_format: str = "contiguous") -> Contender:
    """Return a plain loop in one process with `threads` intra-op threads."""
    job = {**job, "threads": threads, "memory_format": memory_format}
    label = f"plain loop, {counted(threads, 'thread')}, {spelled(memory_format)}"
    return _contender("plain", f"plain.{threads}.{memory_format}", label, job, threads=threads)


def ddp(job: Mapping[str, Any], workers: int, memory_format: str = "contiguous") -> Contender:
    """Return DistributedDataParallel."""
    key, label = f"ddp.{workers}.{memory_format}", f"DDP, {{processes}}, {spelled(memory_format)}"
    return _launched("ddp", key, label, {**job, "memory_format": memory_format}, workers)


def devices(job: Mapping[str, Any], count: int, **choices: Any) -> Contender:
    """Return evenstep in one process; `choices` are further fields of the job."""
    job = {"shards": 8, "memory_format": "preserve", **job, "workers": count, **choices}
    special = _unusual_choices(job)
    key = [f"evenstep.{count}.v{job['shards']}.n{job['examples']}", *special]
    label = [f"evenstep, {counted(count, 'device')}, V = {job['shards']}", *special.values()]
    return _contender("evenstep", ".".join(key), ", ".join(label), job)


def processes(job: Mapping[str, Any], count: int) -> Contender:
    """Return evenstep in several processes with one device each."""
    job = {"shards": 8, "memory_format": "preserve", **job}
    key, label = (
        f"processes.{count}.v{job['shards']}",
        f"evenstep, {{processes}}, V = {job['shards']}",
    )
    return _launched("processes", key, label, job, count)


def steps_for(job: Mapping[str, Any], workers: int, seconds: float) -> int:
    """Return how many steps of a job take evenstep about `seconds`, as measured with a few."""
    trial = devices({**job, "warmup_steps": 1, "steps": 3}, workers)
    taken: float = running.measure(trial)["seconds"] / trial.job["steps"]
    return max(3, math.ceil(seconds / taken))


def torchrun(workers: int) -> tuple[str, ...]:
    """Return the launcher that starts `workers` processes on this machine."""
    return ("torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")


def spelled(memory_format: str) -> str:
    """Return a memory format as tables spell it."""
    return memory_format.replace("_", "-")


def _launched(
    library: str, key: str, label: str, job: Mapping[str, Any], count: int, **more: Any
) -> Contender:
    """Return a contender of several processes under torchrun, with one thread each."""
    label = label.format(processes=counted(count, "process"))
    more = {"launcher": torchrun(count), "threads": 1, **more}
    return _contender(library, key, label, {**job, "workers": count}, **more)


def _contender(
    library: str, key: str, label: str, job: Mapping[str, Any], **more: Any
) -> Contender:
    return Contender(
        key=f"{job['network']}.{key}",
        label=label,
        module="evenstep.bench.contenders",
        job={"library": library, **job},
        **more,
    )


def _unusual_choices(job: Mapping[str, Any]) -> dict[str, str]:
    """Return the choices that differ from the defaults: their forms in a key and in a label."""
    memory_format, precision = job["memory_format"], job.get("precision", "fp32")
    flight = job.get("max_in_flight", 1)
    choices = {
        memory_format: spelled(memory_format) if memory_format != "preserve" else "",
        precision: precision if precision != "fp32" else "",
        f"flight{flight}": f"{flight} steps in flight" if flight != 1 else "",
        "hybridized": "hybridized" if job.get("hybridize") else "",
        "sync": "batch_norm sync" if job.get("batch_norm") == "sync" else "",
    }
    return {short: text for short, text in choices.items() if text}
