"""What `evenstep.record` costs: a plain loop before, during and after a recording of 100 steps."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import contenders, fresh, workload
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import Table, cells, verdict

THREADS, RECORDED, BESIDE, WARM = 2, 100, 25, 3
TRAININGS = {
    "resnet18": ("ResNet-18, 64 images of 28 × 28", {"network": "resnet18", "examples": 64}),
    "gpt.64": ("nanoGPT, 4 layers of 128, 64 texts", {"network": "chargpt-small", "examples": 64}),
    "gpt.12": ("the same, 12 texts", {"network": "chargpt-small", "examples": 12}),
}
MOST = 1.3


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return milliseconds of a step, medians, and the size of the record in MB."""
    given = workload.Job(
        **job, threads=THREADS, warmup_steps=WARM, steps=RECORDED, workers=1, shards=1
    )
    with contenders.plain(given) as training, tempfile.TemporaryDirectory() as folder:
        batches = _again_and_again(training.batches)

        def times_s(count: int) -> list[float]:
            return [_time(training.step, next(batches)) for _ in range(count)]

        times_s(WARM)
        plain_s = times_s(BESIDE)
        with evenstep.record(Path(folder, "it.rec"), steps=RECORDED):
            recorded_s = times_s(RECORDED)
        plain_s += times_s(BESIDE)
        nbytes = sum(file.stat().st_size for file in Path(folder, "it.rec").iterdir())
    return {
        "plain_ms": 1e3 * statistics.median(plain_s),
        "recorded_ms": 1e3 * statistics.median(recorded_s),
        "record_mb": nbytes / 1e6,
    }


def _again_and_again(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def _time(step: Callable[..., Any], batch: Any) -> float:
    begin = time.perf_counter()
    step(*batch)
    return time.perf_counter() - begin


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of costs."""
    head = ("training", "a step, ms", "recorded, ms", "times", "target", "verdict", "record, MB")
    return {"cost": Table(head, [_row(document["runs"], key) for key in TRAININGS])}


def _row(runs: list[Run], key: str) -> list[str]:
    own = select(runs, variant=key)
    plain, recorded, size = (
        cells([run[name] for run in own])[0] for name in ("plain_ms", "recorded_ms", "record_mb")
    )
    times = [run["recorded_ms"] / run["plain_ms"] for run in own]
    return [
        TRAININGS[key][0],
        plain,
        recorded,
        cells(times)[0],
        *verdict(times, at_most=MOST),
        size,
    ]


BENCHMARK = Benchmark(
    name="recording",
    contenders=[script("recording", key, job) for key, (_, job) in TRAININGS.items()],
    tables=tables,
    settings={"threads": THREADS, "recorded": RECORDED, "beside": 2 * BESIDE},
    rounds=3,
)

if __name__ == "__main__":
    fresh.answer(measure)
