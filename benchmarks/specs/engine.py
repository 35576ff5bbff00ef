"""The book's experiments with the engine: queues, waiting, parallelism, copies, memory, cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import evenstep
from benchmark import Benchmark, Contender, script
from evenstep.bench import summarise
from evenstep.bench.rounds import Run
from evenstep.bench.tables import NOTHING, Table, cells, median, small, verdict, with_unit
from evenstep.reproduce.experiments import Jobs, jobs, measurements
from evenstep.reproduce.measures import DEVICES, Job
from evenstep.reproduce.rows import Finding, read_findings

WARMUP_SHARE = 20  # one in so many
EXPERIMENTS = ("queued", "waiting", "together", "copies", "memory")
JOBS: Jobs = {**jobs("full"), "cost": {"tasks": 100_000}}
ENGINE, CHAIN, POOL = "cost.engine:task_us", "cost.chain:task_us", "cost.pool:task_us"
COSTS: Sequence[dict[str, Any]] = (
    {"text": "a task, from `submit` to the end of all", "figure": ENGINE, "at_most": 30.0},
    {"text": "of which in `submit`", "figure": "cost.engine:submit_us"},
    {"text": "a task that takes the result of the one before", "figure": CHAIN},
    {"text": "a call in `ThreadPoolExecutor(2)`", "figure": POOL},
    {"text": "the engine over `ThreadPoolExecutor(2)`", "figure": ENGINE, "over": POOL},
)
FINDINGS: Mapping[str, Sequence[Finding]] = {
    **{name: rows for name, rows in read_findings().items() if name.split(".")[0] in EXPERIMENTS},
    "cost": [Finding(**cost, unit="×" if "over" in cost else "µs") for cost in COSTS],
}
HEAD = ("", "the book", "here", "spread", "here / book", "target", "verdict")


def measure(job: Job) -> dict[str, Any]:
    """Return microseconds per task, until the last `submit` returned and until all have ended.

    The tasks do nothing. In a "chain" each takes the result of the one before.
    """
    kind, results = job["contender"], []
    with evenstep.Engine(devices=DEVICES) as engine:
        for tasks in (job["tasks"] // WARMUP_SHARE, job["tasks"]):
            pool = ThreadPoolExecutor(len(DEVICES))
            submit, wait = engine.submit, engine.waitall
            if kind == "pool":
                submit, wait = pool.submit, pool.shutdown
            began = time.perf_counter()
            if kind == "chain":
                results = [submit(_nothing)]
                for _ in range(tasks - 1):
                    results = [submit(_nothing, *results)]
            else:
                for _ in range(tasks):
                    submit(_nothing)
            submitted = time.perf_counter()
            wait()
            ended = time.perf_counter()
    return {
        "submit_us": 1e6 * (submitted - began) / tasks,
        "task_us": 1e6 * (ended - began) / tasks,
    }


def _nothing(*_: object) -> None:
    pass


def contenders(jobs: Jobs) -> list[Contender]:
    """Return the measurements of the book's experiments, and of the cost of a task."""
    costs = []
    for one in ("engine", "chain", "pool"):
        job, names = {"contender": one, **jobs["cost"]}, {"key": f"cost.{one}"}
        costs.append(script("engine", f"cost.{one}", job, names=names))
    return [*(one for name in EXPERIMENTS for one in measurements(name, jobs)), *costs]


def row(finding: Finding, runs: Sequence[Run]) -> list[str]:
    """Return the row of a finding; HEAD says what is in it."""
    values = finding.values(runs)
    targets = {"at_least": finding.at_least, "at_most": finding.at_most}
    judged = verdict(values, **targets, spell=lambda value: with_unit(value, finding.unit))
    here = median(values, lambda value: with_unit(value, finding.unit))
    over_book = NOTHING
    if values and finding.book is not None:
        over_book = small(summarise(values).median / finding.book)
    return [finding.text, finding.book_text, here, cells(values, small)[1], over_book, *judged]


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
