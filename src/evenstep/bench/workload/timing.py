"""Times the steps of a contender, and prints what was measured."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from evenstep.bench import fresh
from evenstep.bench.workload.job import Batch, Job, Step, make_network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A contender that is ready to train, by steps or by a loop of its own."""

    model: nn.Module  # the model, whose weights are compared with the initial ones in the end
    step: Step | None = None  # trains on one batch
    batches: Iterable[Batch] = ()  # batches to train on; `in_memory` makes them endless
    # trains with a loop of its own, and returns what a `Stopwatch` measured; None for `step`
    loop: Callable[[], Mapping[str, float]] | None = None
    synchronize: Callable[[], object] = lambda: None  # waits for all processes and steps in flight
    is_reporting: bool = True  # whether this process prints the result
    # returns further fields of the result, after the timed steps
    facts: Callable[[], Mapping[str, Any]] = dict

    def time(self, job: Job) -> Mapping[str, float]:
        """Train, and return what the timed steps took, as `Stopwatch.stop` does."""
        if self.loop is not None:
            return self.loop()
        assert self.step is not None
        return time_steps(job, self.batches, self.step, self.synchronize)


def run(
    libraries: Mapping[str, Callable[[Job], contextlib.AbstractContextManager[Training]]],
) -> None:
    """Time the library that the job in the first argument names, and print the result."""

    def measure(fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        job = Job(**fields)
        with libraries[job.library](job) as training:
            timing = training.time(job)
            if not training.is_reporting:
                return None
            return {**timing, **_result(job, timing["seconds"], training)}

    fresh.answer(measure)


class Stopwatch:
    """Measures the clock, the processor and page faults of this process, from its making on."""

    def __init__(self) -> None:
        self._before = _usage()
        self._began_s = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Return what was measured.

        Returns:
            "seconds" by the clock; "user_s" and "kernel_s", the processor time of this process over
            all its threads; "page_faults" that needed no disk. Kernel time and page faults come
            mostly from memory that malloc returned to the system and requests again.
        """
        seconds = time.perf_counter() - self._began_s
        before, after = self._before, _usage()
        return {
            "seconds": seconds,
            "user_s": after.ru_utime - before.ru_utime,
            "kernel_s": after.ru_stime - before.ru_stime,
            "page_faults": after.ru_minflt - before.ru_minflt,
        }


def _usage() -> Any:
    import resource  # not on Windows, where this module is imported too

    return resource.getrusage(resource.RUSAGE_SELF)


def time_steps(
    job: Job, batches: Iterable[Batch], step: Step, synchronize: Callable[[], object]
) -> dict[str, float]:
    """Time `job.steps` calls of `step` after the warm-up, until the last step is done."""
    endless = iter(batches)
    for batch in itertools.islice(endless, job.warmup_steps):
        step(*batch)
    synchronize()
    watch = Stopwatch()
    for batch in itertools.islice(endless, job.steps):
        step(*batch)
    synchronize()
    return watch.stop()


def _result(job: Job, seconds: float, training: Training) -> dict[str, Any]:
    """Return speed, facts, and how far the weights moved.

    Contenders that did the same work moved the weights by the same distance, up to rounding
    (unless the network has batch normalization or dropout).
    """
    initial = make_network(job).parameters()
    moved = [
        (trained.detach() - first.detach()).double().norm()
        for trained, first in zip(training.model.parameters(), initial, strict=True)
    ]
    return {
        "examples_per_s": job.steps * job.examples / seconds,
        "weights_moved": torch.stack(moved).norm().item(),
        "torch_threads": torch.get_num_threads(),
        **training.facts(),
    }
