"""evenstep on two CPU devices of which the second is slowed: by a delay, or by rival processes.

Each lane is pinned to a core of its own. `slowed` is "no", "delay" (after each task the lane sleeps
`factor` - 1 times as long as the task took) or "rivals" (`factor` - 1 busy processes pinned to the
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
from contenders.workload import Job, make_loader, make_network, make_optimizer
from evenstep.devices import Device
from evenstep.engine import Task, ThreadLanes

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
        lanes=lambda places: PinnedLanes(places, factor if slowed == "delay" else 1),
    )
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
    """Lanes pinned to a core each; the slow device's sleep after each task."""

    def __init__(self, devices: tuple[Device, ...], factor: float) -> None:
        super().__init__(devices)
        self._factor = factor

    def open(self, carry_out: Callable[[int, Task], None]) -> None:
        """Start the lanes, each of which pins itself when it gets its first task."""
        pinned = threading.local()

        def slowly(lane: int, task: Task) -> None:
            device = self.devices[lane % len(self.devices)]
            if not hasattr(pinned, "core"):
                pinned.core = sorted(os.sched_getaffinity(0))[device.index]
                os.sched_setaffinity(0, {pinned.core})
            if device.index == SLOW and self._factor > 1:
                task.function = delayed(task.function, self._factor)
            carry_out(lane, task)

        super().open(slowly)


def delayed(function: Callable[..., object], factor: float) -> Callable[..., object]:
    """Return `function`, taking `factor` times as long."""

    def slow(*arguments: object) -> object:
        began = time.perf_counter()
        result = function(*arguments)
        time.sleep((factor - 1) * (time.perf_counter() - began))
        return result

    return slow


def hold_still(trainer: evenstep.Trainer) -> None:
    """Give every device the same number of shards, and let nobody steal."""
    scheduler = trainer._engine.scheduler
    scheduler._steal = lambda lane, now: None
    scheduler.speeds = lambda kind: [1.0] * scheduler.compute


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
