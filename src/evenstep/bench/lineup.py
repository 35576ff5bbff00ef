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
    found = [devices({**job, "loads": True}, count) for count in counts]
    for count in counts[1:]:
        examples = job["examples"] * count // counts[0]
        found.append(devices({**job, "examples": examples, "loads": True}, count))
    return found


def peers(job: Mapping[str, Any], workers: int) -> list[Contender]:
    """Return DDP, with both memory formats for images, Accelerate, and Fabric."""
    memory_formats = ("contiguous",) if job["network"] in TEXT else ("contiguous", "channels_last")
    return [
        *(ddp(job, workers, memory_format) for memory_format in memory_formats),
        accelerate(job, workers),
        _peer(job, workers, "fabric", "Lightning Fabric", needs="lightning_fabric"),
    ]


def accelerate(job: Mapping[str, Any], workers: int) -> Contender:
    """Return Hugging Face Accelerate."""
    launcher = torchrun(workers)
    return _peer(job, workers, "accelerate", "Accelerate", launcher=launcher, needs="accelerate")


def trainers(job: Mapping[str, Any], workers: int) -> list[Contender]:
    """Return Hugging Face's Trainer, with threads and with processes, and EvenTrainer."""
    label = "Hugging Face's Trainer"
    several = {**job, "workers": workers}
    return [
        _contender(
            "transformers",
            f"transformers.1.threads{workers}",
            f"{label}, {counted(workers, 'thread')}",
            {**job, "threads": workers},
            threads=workers,
            needs="transformers",
        ),
        _contender(
            "transformers",
            f"transformers.{workers}",
            f"{label}, {counted(workers, 'process')}",
            several,
            launcher=torchrun(workers),
            threads=1,
            needs="transformers",
        ),
        _contender(
            "even_trainer",
            f"even_trainer.{workers}.v{job.get('shards', 8)}",
            f"EvenTrainer, {counted(workers, 'device')}, V = {job.get('shards', 8)}",
            several,
            needs="transformers",
        ),
    ]


def plain(job: Mapping[str, Any], threads: int, memory_format: str = "contiguous") -> Contender:
    """Return a plain loop in one process with `threads` intra-op threads."""
    job = {**job, "threads": threads, "memory_format": memory_format}
    key, label = f"plain.{threads}.{memory_format}", f"plain loop, {counted(threads, 'thread')}"
    return _contender("plain", key, f"{label}, {spelled(memory_format)}", job, threads=threads)


def ddp(job: Mapping[str, Any], workers: int, memory_format: str = "contiguous") -> Contender:
    """Return DistributedDataParallel."""
    job = {**job, "workers": workers, "memory_format": memory_format}
    key, label = f"ddp.{workers}.{memory_format}", f"DDP, {counted(workers, 'process')}"
    launcher = torchrun(workers)
    return _contender(
        "ddp", key, f"{label}, {spelled(memory_format)}", job, launcher=launcher, threads=1
    )


def devices(job: Mapping[str, Any], count: int, **choices: Any) -> Contender:
    """Return evenstep in one process; `choices` are further fields of the job."""
    job = {"shards": 8, "memory_format": "preserve", **job, "workers": count, **choices}
    special = _unusual_choices(job)
    return _contender(
        "evenstep",
        ".".join([f"evenstep.{count}.v{job['shards']}.n{job['examples']}", *special]),
        ", ".join(
            [f"evenstep, {counted(count, 'device')}, V = {job['shards']}", *special.values()]
        ),
        job,
    )


def processes(job: Mapping[str, Any], count: int) -> Contender:
    """Return evenstep in several processes with one device each."""
    job = {"shards": 8, "memory_format": "preserve", **job, "workers": count}
    return _contender(
        "processes",
        f"processes.{count}.v{job['shards']}",
        f"evenstep, {counted(count, 'process')}, V = {job['shards']}",
        job,
        launcher=torchrun(count),
        threads=1,
    )


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


def _peer(job: Mapping[str, Any], workers: int, name: str, title: str, **more: Any) -> Contender:
    return _contender(
        name,
        f"{name}.{workers}.contiguous",
        f"{title}, {counted(workers, 'process')}, contiguous",
        {**job, "workers": workers},
        threads=1,
        **more,
    )


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
