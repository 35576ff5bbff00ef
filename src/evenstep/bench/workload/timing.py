"""Times training steps: the clock, the processor, and page faults."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from evenstep.bench.workload.job import Batch, Job, Step


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


def each_ms(call: Callable[[], object], calls: int, warmup: int = 0) -> list[float]:
    """Return the milliseconds of each of `calls` calls, after the warm-up."""
    times_ms = []
    for _ in range(warmup + calls):
        began_s = time.perf_counter()
        call()
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    return times_ms[warmup:]
