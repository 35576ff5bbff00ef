"""What `evenstep.record` costs: a plain loop before, during and after a recording of 100 steps."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import evenstep
from benchmark import Benchmark, column, script
from evenstep.bench import contenders, workload
from evenstep.bench.tables import Table, median, verdict

THREADS, RECORDED, BESIDE, WARM = 2, 100, 25, 3
TRAININGS = {
    "resnet18": ("ResNet-18, 64 images of 28 × 28", {"network": "resnet18", "examples": 64}),
    "gpt.64": ("nanoGPT, 4 layers of 128, 64 texts", {"network": "chargpt-small", "examples": 64}),
    "gpt.12": ("the same, 12 texts", {"network": "chargpt-small", "examples": 12}),
}
MOST = 1.3


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return milliseconds of a step, medians, and the size of the record in MB."""
    given = workload.Job(**job, threads=THREADS, warmup_steps=WARM, steps=RECORDED, shards=1)
    with contenders.plain(given) as training, tempfile.TemporaryDirectory() as folder:
        batches, step = iter(training.batches), training.step
        assert step is not None

        def each_ms(count: int, warmup: int = 0) -> list[float]:
            return workload.each_ms(lambda: step(*next(batches)), count, warmup)

        plain_ms, record = each_ms(BESIDE, WARM), Path(folder, "it.rec")
        with evenstep.record(record, steps=RECORDED):
            recorded_ms = each_ms(RECORDED)
        plain_ms += each_ms(BESIDE)
        nbytes = sum(file.stat().st_size for file in record.iterdir())
    return {
        "plain_ms": statistics.median(plain_ms),
        "recorded_ms": statistics.median(recorded_ms),
        "record_mb": nbytes / 1e6,
    }


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of costs."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        plain, recorded, size = (
            column(runs, name) for name in ("plain_ms", "recorded_ms", "record_mb")
        )
        times = [with_it / without for with_it, without in zip(recorded, plain, strict=True)]
        spelled = map(median, (plain, recorded, times))
        rows.append([one.label, *spelled, *verdict(times, at_most=MOST), median(size)])
    head = ("training", "a step, ms", "recorded, ms", "times", "target", "verdict", "record, MB")
    return {"cost": Table(head, rows)}


BENCHMARK = Benchmark(
    name="recording",
    contenders=[script("recording", key, job, label) for key, (label, job) in TRAININGS.items()],
    tables=tables,
    settings={"threads": THREADS, "recorded": RECORDED, "beside": 2 * BESIDE},
    rounds=3,
)
