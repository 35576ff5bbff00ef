"""The same operation many times over: waiting for each result, or once at the end."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch

import evenstep
from evenstep.book.reproduce.engine.common import DEVICES, BareThreads, Job, run

WARMUP = 3  # calls on each device


def measure(job: Job) -> dict[str, Any]:
    """Return the seconds of `count` calls, and the page faults of the process.

    Bare threads: one thread makes all calls in place of waiting, or two make half of them each.
    Page faults are those that needed no disk: pages of memory that malloc gave back and asks for
    again. A result of these sizes takes thousands of them, or none, as malloc's history has it.
    """
    x = torch.rand(job["size"], job["size"])
    arguments: tuple[Any, ...] = {"add": (torch.add, x, 1), "mm": (torch.mm, x, x)}[
        job["operation"]
    ]
    way = in_engine if job["contender"] == "engine" else in_threads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds = way(*arguments, count=job["count"], wait_each=job["waits"] == "each")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"seconds": seconds, "page_faults": faults}


def in_engine(
    function: Callable[..., object], *arguments: object, count: int, wait_each: bool
) -> float:
    """Return the seconds with the engine: each call is a task for whichever device is free."""
    with evenstep.Engine(devices=DEVICES) as engine:
        for device in WARMUP * DEVICES:
            engine.submit(function, *arguments, device=device)
        engine.waitall()
        began = time.perf_counter()
        for _ in range(count):
            y = engine.submit(function, *arguments)
            if wait_each:
                y.wait_to_read()
        engine.waitall()
        return time.perf_counter() - began


def in_threads(
    function: Callable[..., object], *arguments: object, count: int, wait_each: bool
) -> float:
    """Return the seconds with one bare thread, or with two that share the calls."""

    def calls(number: int) -> None:
        for _ in range(number):
            function(*arguments)

    with BareThreads() as threads:
        for thread in range(len(DEVICES)):
            threads.start(thread, lambda: calls(WARMUP))
        threads.wait()
        began = time.perf_counter()
        if wait_each:
            threads.start(0, lambda: calls(count))
        else:
            threads.start(0, lambda: calls(count - count // 2))
            threads.start(1, lambda: calls(count // 2))
        threads.wait()
        return time.perf_counter() - began


if __name__ == "__main__":
    run(measure)
