"""The book's experiments with the engine: queues, waiting, parallelism, copies, memory, cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import Contender, summarise
from evenstep.bench.rounds import Run
from evenstep.bench.tables import NOTHING, Table, cells, small, verdict, with_unit
from evenstep.reproduce.engine.common import DEVICES, Job, run
from evenstep.reproduce.findings import Finding, read_findings
from evenstep.reproduce.lineup import Jobs, jobs, measurements

WARMUP_SHARE = 20  # one in so many


def measure(job: Job) -> dict[str, Any]:
    """Return microseconds per task, until the last `submit` returned and until all have ended.

    The tasks do nothing. In a "chain" each takes the result of the one before.
    """
    submit_all = _chained if job["contender"] == "chain" else _independent
    with evenstep.Engine(devices=DEVICES) as engine:
        for tasks in (job["tasks"] // WARMUP_SHARE, job["tasks"]):
            pool = ThreadPoolExecutor(len(DEVICES))
            is_pool = job["contender"] == "pool"
            executor, wait = (pool, pool.shutdown) if is_pool else (engine, engine.waitall)
            began = time.perf_counter()
            submit_all(executor, tasks)
            submitted = time.perf_counter()
            wait()
            ended = time.perf_counter()
    return {
        "submit_us": 1e6 * (submitted - began) / tasks,
        "task_us": 1e6 * (ended - began) / tasks,
    }


def _nothing(*_: object) -> None:
    pass


def _independent(executor: Any, tasks: int) -> None:
    for _ in range(tasks):
        executor.submit(_nothing)


def _chained(engine: Any, tasks: int) -> None:
    handle = engine.submit(_nothing)
    for _ in range(tasks - 1):
        handle = engine.submit(_nothing, handle)


JOBS: Jobs = {**jobs("full"), "cost": {"tasks": 100_000}}
COSTS = (
    ("a task, from `submit` to the end of all", "cost.engine:task_us", None, 30.0),
    ("of which in `submit`", "cost.engine:submit_us", None, None),
    ("a task that takes the result of the one before", "cost.chain:task_us", None, None),
    ("a call in `ThreadPoolExecutor(2)`", "cost.pool:task_us", None, None),
    ("the engine over `ThreadPoolExecutor(2)`", "cost.engine:task_us", "cost.pool:task_us", None),
)
FINDINGS: Mapping[str, Sequence[Finding]] = {
    **{
        name: rows
        for name, rows in read_findings().items()
        if name != "hybridize" and not name.startswith("mxnet.")
    },
    "cost": [
        Finding(text=text, figure=figure, over=over, unit="×" if over else "µs", at_most=at_most)
        for text, figure, over, at_most in COSTS
    ],
}
HEAD = ("", "the book", "here", "spread", "here / book", "target", "verdict")


def contenders(jobs: Jobs) -> list[Contender]:
    """Return the measurements of the book's experiments, and of the cost of a task."""
    costs = [
        script("engine", key, {"contender": one, **jobs["cost"]}, names={"key": key})
        for one in ("engine", "chain", "pool")
        for key in [f"cost.{one}"]
    ]
    return [*measurements(jobs), *costs]


def row(finding: Finding, runs: Sequence[Run]) -> list[str]:
    """Return the row of a finding; HEAD says what is in it."""
    values = finding.values(runs)
    medians = [summarise(values).median] if values else []
    judged = verdict(
        values,
        at_least=finding.at_least,
        at_most=finding.at_most,
        spell=lambda value: with_unit(value, finding.unit),
    )
    over_book = [small(median / finding.book) for median in medians if finding.book is not None]
    return [
        finding.text,
        finding.book_text,
        *([with_unit(median, finding.unit) for median in medians] or [NOTHING]),
        cells(values, small)[1],
        *(over_book or [NOTHING]),
        *judged,
    ]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return a table for each experiment, those that were not measured included."""
    runs = document["runs"]
    return {
        name: Table(HEAD, [row(finding, runs) for finding in findings])
        for name, findings in FINDINGS.items()
    }


BENCHMARK = Benchmark(
    name="engine_experiments", settings=JOBS, contenders=contenders(JOBS), tables=tables
)

if __name__ == "__main__":
    run(measure)
