"""What a task costs that does nothing: the engine beside `concurrent.futures`."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import evenstep
from evenstep.book.reproduce.engine.common import DEVICES, Job, run

WARMUP_SHARE = 20  # one in so many


def measure(job: Job) -> dict[str, Any]:
    """Return microseconds a task: until the last `submit` returned, and until all have ended."""
    way = {"engine": in_engine, "chain": chain_in_engine, "pool": in_pool}[job["contender"]]
    submit_s, seconds = way(job["tasks"])
    return {"submit_us": 1e6 * submit_s / job["tasks"], "task_us": 1e6 * seconds / job["tasks"]}


def nothing(*_: object) -> None:
    """Do nothing."""


def in_engine(tasks: int) -> tuple[float, float]:
    """Submit independent tasks, with two lanes to choose from."""
    with evenstep.Engine(devices=DEVICES) as engine:
        for number in (tasks // WARMUP_SHARE, tasks):
            began = time.perf_counter()
            for _ in range(number):
                engine.submit(nothing)
            submitted = time.perf_counter()
            engine.waitall()
            ended = time.perf_counter()
    return submitted - began, ended - began


def chain_in_engine(tasks: int) -> tuple[float, float]:
    """Submit tasks that take the result of the one before."""
    with evenstep.Engine(devices=DEVICES) as engine:
        for number in (tasks // WARMUP_SHARE, tasks):
            began = time.perf_counter()
            handle = engine.submit(nothing)
            for _ in range(number - 1):
                handle = engine.submit(nothing, handle)
            submitted = time.perf_counter()
            engine.waitall()
            ended = time.perf_counter()
    return submitted - began, ended - began


def in_pool(tasks: int) -> tuple[float, float]:
    """Submit independent calls to a pool of two threads."""
    for number in (tasks // WARMUP_SHARE, tasks):
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(DEVICES)) as pool:
            for _ in range(number):
                pool.submit(nothing)
            submitted = time.perf_counter()
        ended = time.perf_counter()
    return submitted - began, ended - began


if __name__ == "__main__":
    run(measure)
