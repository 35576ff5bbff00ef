"""Who runs in `training_speed.py`: every contender as a value."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from allocators import ALLOCATORS

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
STEPS = {"lenet": (5, 176), "resnet18": (2, 5)}  # warm-up, timed: 3 s and more at the fastest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way of training.

    Attributes:
        key: its name in files: network, library, and what tells it from its neighbours.
        label: its name in tables.
        module: the script below `benchmarks`.
        job: fields of `contenders.workload.Job`.
        launcher: what starts its processes.
        needs: the package it is skipped without.
        malloc: a key of ALLOCATORS.
    """

    key: str
    label: str
    module: str
    job: dict[str, Any]
    launcher: tuple[str, ...] = ()
    needs: str | None = None
    malloc: str = "default"

    @property
    def network(self) -> str:
        """The network it trains."""
        return str(self.job["network"])

    @property
    def variables(self) -> dict[str, str]:
        """Its environment: threads as torchrun sets them; evenstep sets its own."""
        if self.module == "contenders.evenstep_devices":
            return ALLOCATORS[self.malloc]
        return {"OMP_NUM_THREADS": str(self.job.get("threads", 1)), **ALLOCATORS[self.malloc]}

    @property
    def is_there(self) -> bool:
        """Whether the package that it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def lineup() -> list[Contender]:
    """Return all contenders, LeNet's first."""
    return _lenet() + _resnet18()


def chosen(only: str | None) -> list[Contender]:
    """Return the contenders that `only` names: keys or their beginnings, between commas."""
    wanted = tuple(only.split(",")) if only else ("",)
    found = [contender for contender in lineup() if contender.key.startswith(wanted)]
    if not found:
        keys = ", ".join(contender.key for contender in lineup())
        raise SystemExit(f"--only {only} names no contender: write the beginning of some of {keys}")
    return found


def _lenet() -> list[Contender]:
    network, examples = "lenet", 256
    return [
        _plain(network, examples, 1, "contiguous"),
        _plain(network, examples, 1, "channels_last"),
        _plain(network, examples, 2, "contiguous"),
        _plain(network, examples, 2, "channels_last"),
        *_peers(network, examples),
        _evenstep(network, examples, 1, 8),
        _evenstep(network, examples, 2, 8),
        _evenstep(network, examples, 2, 8, max_in_flight=2),
        _evenstep(network, examples, 2, 2),
        _evenstep(network, examples, 1, 8, memory_format="contiguous"),
        _evenstep(network, examples, 2, 8, memory_format="contiguous"),
        _keeping(_plain(network, examples, 1, "channels_last")),
        _keeping(_ddp(network, examples, "channels_last")),
    ]


def _resnet18() -> list[Contender]:
    network, one, two = "resnet18", 64, 128
    return [
        _plain(network, one, 1, "contiguous"),
        *_peers(network, two),
        _evenstep(network, one, 1, 8),
        _evenstep(network, two, 1, 8),
        _evenstep(network, two, 2, 8),
        _evenstep(network, two, 2, 8, max_in_flight=2),
        _evenstep(network, one, 1, 2),
        _evenstep(network, two, 2, 2),
        _evenstep(network, one, 1, 8, precision="bf16"),
        _evenstep(network, two, 2, 8, precision="bf16"),
        _keeping(_ddp(network, two, "channels_last")),
    ]


def _peers(network: str, examples: int) -> list[Contender]:
    job = _job(network, examples, workers=2)
    return [
        _ddp(network, examples, "contiguous"),
        _ddp(network, examples, "channels_last"),
        Contender(
            key=f"{network}.accelerate.2.contiguous",
            label="Accelerate, 2 processes, contiguous",
            module="contenders.accelerate_cpu",
            job=job,
            launcher=TORCHRUN,
            needs="accelerate",
        ),
        Contender(
            key=f"{network}.fabric.2.contiguous",
            label="Lightning Fabric, 2 processes, contiguous",
            module="contenders.fabric_cpu",
            job=job,
            needs="lightning_fabric",
        ),
    ]


def _keeping(contender: Contender) -> Contender:
    """Return the contender with a malloc that keeps freed memory (`allocators.py`)."""
    return dataclasses.replace(
        contender,
        key=f"{contender.key}.keeps",
        label=f"{contender.label}, malloc keeps",
        malloc="keeps",
    )


def _plain(network: str, examples: int, threads: int, layout: str) -> Contender:
    return Contender(
        key=f"{network}.plain.{threads}.{layout}",
        label=f"plain loop, {_count(threads, 'thread')}, {_spelled(layout)}",
        module="contenders.plain",
        job=_job(network, examples, threads=threads, memory_format=layout),
    )


def _ddp(network: str, examples: int, layout: str) -> Contender:
    return Contender(
        key=f"{network}.ddp.2.{layout}",
        label=f"DDP, 2 processes, {_spelled(layout)}",
        module="contenders.ddp",
        job=_job(network, examples, workers=2, memory_format=layout),
        launcher=TORCHRUN,
    )


def _evenstep(
    network: str,
    examples: int,
    devices: int,
    shards: int,
    *,
    memory_format: str = "auto",
    precision: str = "fp32",
    max_in_flight: int = 1,
) -> Contender:
    layout = "" if memory_format == "auto" else f".{memory_format}"
    bf16 = "" if precision == "fp32" else f".{precision}"
    flight = "" if max_in_flight == 1 else f".flight{max_in_flight}"
    return Contender(
        key=f"{network}.evenstep.{devices}.v{shards}.n{examples}{layout}{bf16}{flight}",
        label=f"evenstep, {_count(devices, 'device')}, V = {shards}"
        + (f", {_spelled(memory_format)}" if layout else "")
        + (f", {precision}" if bf16 else "")
        + (f", {max_in_flight} steps in flight" if flight else ""),
        module="contenders.evenstep_devices",
        job=_job(
            network,
            examples,
            workers=devices,
            shards=shards,
            memory_format=memory_format,
            precision=precision,
            max_in_flight=max_in_flight,
        ),
    )


def _job(network: str, examples: int, **more: Any) -> dict[str, Any]:
    warmup_steps, steps = STEPS[network]
    return {
        "network": network,
        "examples": examples,
        **more,
        "warmup_steps": warmup_steps,
        "steps": steps,
    }


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("s" if number > 1 else "")


def _spelled(layout: str) -> str:
    return layout.replace("_", "-")
