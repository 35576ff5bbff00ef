"""Devices of different speed: both together against the sum of what each does alone.

One of two CPU devices, each pinned to a core, is slowed `factor` times: by a delay in its lane
after each shard ("delay"), or by busy processes on its core ("rivals"). In "rivals.fast alone" the
fast device trains beside the busy processes, which slow it too (caches, memory).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import evenstep
from benchmark import Benchmark, script
from evenstep.batch.assignment import Pace, ShardQueue
from evenstep.bench import Contender, fresh, workload
from evenstep.bench.rounds import Run, by_round, select
from evenstep.bench.tables import Table, cells, number, verdict
from evenstep.engine import ThreadLanes
from evenstep.steps.executors import independent

SLOW = 1
CORES = sorted(os.sched_getaffinity(0))
CHOICES = ("slowed", "factor", "devices", "steal")


def measure(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the speed, the shards of each device, and the fingerprint."""
    slowed, factor, devices, steal = (fields[name] for name in CHOICES)
    job = workload.Job(**{name: value for name, value in fields.items() if name not in CHOICES})
    model = workload.make_network(job)
    trainer = evenstep.Trainer(
        model,
        workload.make_optimizer(job, model),
        loss=torch.nn.CrossEntropyLoss(),
        devices=[f"cpu:{number}" for number in devices],
        shards=job.shards,
        layout=evenstep.Layout(lanes=PinnedLanes),
    )
    if slowed == "delay":
        independent.compute_shard = _delayed(independent.compute_shard, factor)
    if not steal:  # the same number of shards for every device
        ShardQueue._steal = lambda queue, thief, now: None
        Pace.speeds = lambda pace, lost=(): [1.0] * len(devices)
    with trainer, _rivals(factor - 1 if slowed == "rivals" else 0):
        timing = workload.time_steps(
            job, workload.in_memory(workload.make_loader(job)), trainer.step, trainer.waitall
        )
        shares = trainer.shares()
    return {
        "examples_per_s": job.steps * job.examples / timing["seconds"],
        "shards": [own.shards for own in shares],
        "stolen": [own.stolen for own in shares],
        "fingerprint": trainer.fingerprint(),
    }


class PinnedLanes(ThreadLanes):
    """Lanes that are each pinned to the core of their device."""

    def put(self, lane: int, work: Callable[[int], object]) -> None:
        """Queue the call `work(lane)`, on the core of the lane's device."""

        def on_its_core(lane: int) -> None:
            device = self.devices[lane % len(self.devices)]
            os.sched_setaffinity(0, {CORES[device.index]})
            work(lane)

        super().put(lane, on_its_core)


def _delayed(function: Callable[..., object], factor: float) -> Callable[..., object]:
    """Return `function`, taking `factor` times as long on the slow device."""

    def slow(*arguments: object, **options: object) -> object:
        began = time.perf_counter()
        result = function(*arguments, **options)
        if threading.current_thread().name == f"evenstep cpu:{SLOW}":
            time.sleep((factor - 1) * (time.perf_counter() - began))
        return result

    return slow


@contextlib.contextmanager
def _rivals(count: int) -> Iterator[None]:
    """Keep `count` busy processes on the slow device's core."""
    command = ["taskset", "-c", str(CORES[SLOW]), sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


TARGET_SHARE = 0.9
FACTOR = 3
SETTINGS = {"network": "lenet", "examples": 1024, "shards": 8, "warmup_steps": 10, "steps": 40}
SLOWED = {
    "delay": "a delay in its lane after each shard",
    "rivals": "busy processes pinned to its core",
}
BOTH, STILL = "both", "both, without stealing"
PARTS: dict[str, dict[str, Any]] = {
    "fast alone": {"devices": [0], "slowed": "no"},
    "rivals.fast alone": {"devices": [0], "slowed": "rivals"},
    **{
        f"{slowed}.{name}": {"slowed": slowed, **part}
        for slowed in SLOWED
        for name, part in (
            ("slow alone", {"devices": [1]}),
            (BOTH, {"devices": [0, 1]}),
            (STILL, {"devices": [0, 1], "steal": False}),
        )
    },
    "even": {"devices": [0, 1], "slowed": "no"},
}


def _contender(part: str, choices: Mapping[str, Any]) -> Contender:
    job = {"steal": True, "factor": FACTOR, **SETTINGS, **choices}
    return script("uneven", part, job, names={"part": part})


def shares_of_sum(runs: list[Run], both: str, fast: str, slow: str) -> list[float]:
    """Return for each round the speed of both devices over the sum of their own speeds."""
    speeds = [by_round(runs, "examples_per_s", part=part) for part in (both, fast, slow)]
    rounds = sorted(set.intersection(*map(set, speeds)))
    return [
        together / (one + other)
        for together, one, other in ([speed[number] for speed in speeds] for number in rounds)
    ]


def _row(runs: list[Run], slowed: str, devices: str, part: str, fast: str, slow: str) -> list[str]:
    own = select(runs, part=part)
    speed, _ = cells([run["examples_per_s"] for run in own])
    counts = zip(*(run["shards"] for run in own), strict=True)
    shards = " and ".join(str(round(sum(count) / len(own))) for count in counts)
    shares = shares_of_sum(runs, part, fast, slow)
    has_target = devices == BOTH and fast != slow
    judged = verdict(shares, at_least=TARGET_SHARE if has_target else None)
    return [slowed, devices, speed, shards, *cells(shares, number), *judged]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of shares; two even devices show what sharing the machine costs."""
    runs, parts = document["runs"], {run["part"] for run in document["runs"]}
    rows = []
    for slowed, text in SLOWED.items():
        beside = f"{slowed}.fast alone"
        fast = beside if beside in parts else "fast alone"
        for devices in (BOTH, STILL):
            slow = f"{slowed}.slow alone"
            rows.append(_row(runs, text, devices, f"{slowed}.{devices}", fast, slow))
    rows.append(_row(runs, "nothing", BOTH, "even", "fast alone", "fast alone"))
    head = ("slowed by", "devices", "examples/s", "shards of each", "share of the sum", "spread")
    return {"shares": Table((*head, "target", "verdict"), rows, 2)}


BENCHMARK = Benchmark(
    name="uneven_devices",
    settings={**SETTINGS, "factor": FACTOR},
    contenders=[_contender(part, choices) for part, choices in PARTS.items()],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
