"""Who is measured: every contender as a value."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

_HERE = "evenstep.bench.contenders"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way of training.

    Attributes:
        key: its name in files: network, library, and what tells it from its neighbours.
        label: its name in tables.
        module: the script, as Python imports it.
        job: fields of `workload.Job`.
        launcher: what starts its processes.
        needs: the package it is left out without.
        environment: more variables than those that every run has.
    """

    key: str
    label: str
    module: str
    job: Mapping[str, Any]
    launcher: tuple[str, ...] = ()
    needs: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def network(self) -> str:
        """The network it trains."""
        return str(self.job["network"])

    @property
    def variables(self) -> dict[str, str]:
        """Its environment: threads as torchrun sets them; evenstep sets its own."""
        if self.module.endswith("evenstep_devices"):
            return dict(self.environment)
        return {"OMP_NUM_THREADS": str(self.job.get("threads", 1)), **self.environment}

    @property
    def is_there(self) -> bool:
        """Whether the package that it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def described(self) -> dict[str, Any]:
        """Return what a result file says of it."""
        more = {"environment": dict(self.environment)} if self.environment else {}
        return {"key": self.key, "label": self.label, **more, **self.job}


def side_by_side(job: Mapping[str, Any], workers: int) -> list[Contender]:
    """Return everybody who trains the same: a plain loop, the peers, evenstep.

    Args:
        job: fields of `workload.Job` that all share.
        workers: processes or devices of those who have several.
    """
    return [
        plain(job, 1),
        plain(job, workers),
        ddp(job, workers),
        ddp(job, workers, "channels_last"),
        accelerate(job, workers),
        fabric(job, workers),
        devices(job, workers),
        devices(job, workers, hybridize=True),
        processes(job, workers),
    ]


def scaling(job: Mapping[str, Any], counts: Sequence[int]) -> list[Contender]:
    """Return evenstep on each number of devices: with the same batch, and with one that grows.

    Args:
        job: fields of `workload.Job`; its `examples` are the batch of the least number.
        counts: of devices, the least first.
    """
    found = [devices({**job, "loads": True}, count) for count in counts]
    for count in counts[1:]:
        examples = job["examples"] * count // counts[0]
        found.append(devices({**job, "examples": examples, "loads": True}, count))
    return found


def plain(job: Mapping[str, Any], threads: int, layout: str = "contiguous") -> Contender:
    """Return a plain loop in one process."""
    return Contender(
        key=f"{job['network']}.plain.{threads}.{layout}",
        label=f"plain loop, {counted(threads, 'thread')}, {spelled(layout)}",
        module=f"{_HERE}.plain",
        job={**job, "threads": threads, "memory_format": layout},
    )


def ddp(job: Mapping[str, Any], workers: int, layout: str = "contiguous") -> Contender:
    """Return DistributedDataParallel."""
    return Contender(
        key=f"{job['network']}.ddp.{workers}.{layout}",
        label=f"DDP, {counted(workers, 'process')}, {spelled(layout)}",
        module=f"{_HERE}.ddp",
        job={**job, "workers": workers, "memory_format": layout},
        launcher=torchrun(workers),
    )


def accelerate(job: Mapping[str, Any], workers: int) -> Contender:
    """Return Hugging Face Accelerate."""
    return Contender(
        key=f"{job['network']}.accelerate.{workers}.contiguous",
        label=f"Accelerate, {counted(workers, 'process')}, contiguous",
        module=f"{_HERE}.accelerate_cpu",
        job={**job, "workers": workers},
        launcher=torchrun(workers),
        needs="accelerate",
    )


def fabric(job: Mapping[str, Any], workers: int) -> Contender:
    """Return Lightning Fabric, which starts its processes itself."""
    return Contender(
        key=f"{job['network']}.fabric.{workers}.contiguous",
        label=f"Lightning Fabric, {counted(workers, 'process')}, contiguous",
        module=f"{_HERE}.fabric_cpu",
        job={**job, "workers": workers},
        needs="lightning_fabric",
    )


def devices(job: Mapping[str, Any], count: int, **choices: Any) -> Contender:
    """Return evenstep in one process; `choices` are further fields of the job."""
    job = {"shards": 8, "memory_format": "auto", **job, "workers": count, **choices}
    return Contender(
        key=f"{job['network']}.evenstep.{count}.v{job['shards']}.n{job['examples']}"
        + "".join(f".{short}" for short, _ in _told(job)),
        label=f"evenstep, {counted(count, 'device')}, V = {job['shards']}"
        + "".join(f", {long}" for _, long in _told(job)),
        module=f"{_HERE}.evenstep_devices",
        job=job,
    )


def processes(job: Mapping[str, Any], count: int) -> Contender:
    """Return evenstep in processes of one device each."""
    return Contender(
        key=f"{job['network']}.processes.{count}.v{job.get('shards', 8)}",
        label=f"evenstep, {counted(count, 'process')}, V = {job.get('shards', 8)}",
        module=f"{_HERE}.evenstep_processes",
        job={"memory_format": "auto", **job, "workers": count},
        launcher=torchrun(count),
    )


def torchrun(workers: int) -> tuple[str, ...]:
    """Return the launcher of so many processes on this machine."""
    return ("torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")


def counted(number: int, thing: str) -> str:
    """Return a number with its noun."""
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{number} {thing if number == 1 else plural}"


def spelled(layout: str) -> str:
    """Return a memory format as prose has it."""
    return layout.replace("_", "-")


def _told(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the choices that are not the usual ones: for a key, and for a label."""
    layout, precision = job["memory_format"], job.get("precision", "fp32")
    flight = job.get("max_in_flight", 1)
    return [
        *([(layout, spelled(layout))] if layout != "auto" else []),
        *([(precision, precision)] if precision != "fp32" else []),
        *([(f"flight{flight}", f"{flight} steps in flight")] if flight != 1 else []),
        *([("hybridized", "hybridized")] if job.get("hybridize") else []),
        *([("sync", "batch_norm sync")] if job.get("batch_norm") == "sync" else []),
    ]
