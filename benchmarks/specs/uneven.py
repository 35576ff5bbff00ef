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

from torch import nn

import evenstep
from benchmark import Benchmark, Contender, column, script
from evenstep.batch.assignment import Pace, ShardQueue
from evenstep.bench import workload
from evenstep.bench.rounds import Run, by_round, select
from evenstep.bench.tables import Table, cells, median, verdict
from evenstep.engine import ThreadLanes
from evenstep.steps.executors import independent

SLOW = 1
CORES = sorted(os.sched_getaffinity(0))
CHOICES = ("slowed", "factor", "devices", "steal")
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


def measure(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the speed, the shards of each device, and the fingerprint."""
    slowed, factor, devices, steal = (fields[name] for name in CHOICES)
    job = workload.Job(**{name: value for name, value in fields.items() if name not in CHOICES})
    model = workload.make_network(job)
    trainer = evenstep.Trainer(
        model,
        workload.make_optimizer(job, model),
        loss=nn.CrossEntropyLoss(),
        devices=[f"cpu:{number}" for number in devices],
        shards=job.shards,
        layout=evenstep.Layout(lanes=PinnedLanes),
    )
    if slowed == "delay":
        independent.compute_shard = _delayed(independent.compute_shard, factor)
    if not steal:  # the same number of shards for every device
        ShardQueue._steal = lambda queue, thief, now: None
        Pace.speeds = lambda pace, lost=(): [1.0] * len(devices)
    batches = workload.in_memory(workload.make_loader(job))
    with trainer, _rivals(factor - 1 if slowed == "rivals" else 0):
        timing = workload.time_steps(job, batches, trainer.step, trainer.waitall)
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


def _row(runs: list[Run], slowed: str, devices: str, part: str, fast: str, slow: str) -> list[str]:
    """Return the row of both devices: their speed over the sum of their own, round by round."""
    own = select(runs, part=part)
    speeds = [by_round(runs, "examples_per_s", part=one) for one in (part, fast, slow)]
    rounds = sorted(set.intersection(*map(set, speeds)))
    both, one, other = ([speed[number] for number in rounds] for speed in speeds)
    shares = [a / (b + c) for a, b, c in zip(both, one, other, strict=True)]
    counts = zip(*column(own, "shards"), strict=True)
    shards = " and ".join(str(round(sum(count) / len(own))) for count in counts)
    has_target = devices == BOTH and fast != slow
    judged = verdict(shares, at_least=TARGET_SHARE if has_target else None)
    return [slowed, devices, median(column(own, "examples_per_s")), shards, *cells(shares), *judged]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of shares; two even devices show what sharing the machine costs."""
    runs, parts = document["runs"], {run["part"] for run in document["runs"]}
    rows = []
    for slowed, text in SLOWED.items():
        beside, slow = f"{slowed}.fast alone", f"{slowed}.slow alone"
        fast = beside if beside in parts else "fast alone"
        rows += [_row(runs, text, one, f"{slowed}.{one}", fast, slow) for one in (BOTH, STILL)]
    rows.append(_row(runs, "nothing", BOTH, "even", "fast alone", "fast alone"))
    head = ("slowed by", "devices", "examples/s", "shards of each", "share of the sum", "spread")
    return {"shares": Table((*head, "target", "verdict"), rows, 2)}


def _contender(part: str) -> Contender:
    job = {"steal": True, "factor": FACTOR, **SETTINGS, **PARTS[part]}
    return script("uneven", part, job, names={"part": part})


BENCHMARK = Benchmark(
    name="uneven_devices",
    settings={**SETTINGS, "factor": FACTOR},
    contenders=[*map(_contender, PARTS)],
    tables=tables,
)
