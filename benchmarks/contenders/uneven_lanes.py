"""evenstep on two CPU devices of which the second is slowed: by a delay, or by rival processes.

Each lane is pinned to a core. `slowed` is "no", "delay" (after each shard the lane sleeps
`factor` - 1 times as long as the shard took) or "rivals" (`factor` - 1 busy processes pinned to the
core). `devices` are those that take part: [0], [1] or [0, 1].
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

import evenstep
from evenstep.bench.workload import Job, make_loader, make_network, make_optimizer
from evenstep.engine import Pace, Runs, Task, ThreadLanes
from evenstep.training import executor

SLOW = 1
BUSY = "while True: pass"


def main() -> None:
    """Train, and print the line."""
    wanted = json.loads(sys.argv[1])
    job = Job(**wanted["job"])
    slowed, factor, devices = wanted["slowed"], wanted["factor"], wanted["devices"]
    model = make_network(job)
    trainer = evenstep.Trainer(
        model,
        make_optimizer(model),
        loss=torch.nn.CrossEntropyLoss(),
        devices=[f"cpu:{number}" for number in devices],
        shards=job.shards,
        max_in_flight=wanted["max_in_flight"],
        lanes=PinnedLanes,
    )
    if slowed == "delay":
        executor.compute_shard = delayed(executor.compute_shard, factor)
    if not wanted["steal"]:
        hold_still(trainer)
    batches = itertools.cycle(list(make_loader(job)))
    with trainer, rivals(factor - 1 if slowed == "rivals" else 0):
        for images, labels in itertools.islice(batches, job.warmup_steps):
            trainer.step(images, labels)
        trainer.waitall()
        began = time.perf_counter()
        for images, labels in itertools.islice(batches, job.steps):
            trainer.step(images, labels)
        trainer.waitall()
        seconds = time.perf_counter() - began
        shares = trainer.shares()
    line = {
        "examples_per_s": job.steps * job.examples / seconds,
        "shards": [own.shards for own in shares],
        "stolen": [own.stolen for own in shares],
        "fingerprint": trainer.fingerprint(),
    }
    print(json.dumps(line), flush=True)


class PinnedLanes(ThreadLanes):
    """Lanes that pin themselves to a core each, when they get their first task."""

    def open(self, carry_out: Callable[[int, Task], None]) -> None:
        """Start the lanes."""
        pinned = threading.local()

        def on_its_core(lane: int, task: Task) -> None:
            if not hasattr(pinned, "core"):
                device = self.devices[lane % len(self.devices)]
                pinned.core = sorted(os.sched_getaffinity(0))[device.index]
                os.sched_setaffinity(0, {pinned.core})
            carry_out(lane, task)

        super().open(on_its_core)


def delayed(function: Callable[..., object], factor: float) -> Callable[..., object]:
    """Return `function`, taking `factor` times as long on the slow device."""

    def slow(*arguments: object, **options: object) -> object:
        began = time.perf_counter()
        result = function(*arguments, **options)
        if threading.current_thread().name == f"evenstep cpu:{SLOW}":
            time.sleep((factor - 1) * (time.perf_counter() - began))
        return result

    return slow


def hold_still(trainer: evenstep.Trainer) -> None:
    """Give every device the same number of shards, and let nobody steal."""
    Runs.steal = lambda runs, thief, now: None
    Pace.speeds = lambda pace, kind, lost: [1.0] * len(trainer.devices)


@contextlib.contextmanager
def rivals(count: int) -> Iterator[None]:
    """Keep `count` busy processes on the slow device's core."""
    core = sorted(os.sched_getaffinity(0))[SLOW]
    command = ["taskset", "-c", str(core), sys.executable, "-c", BUSY]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
