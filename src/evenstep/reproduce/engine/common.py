"""What the experiments share: devices, entry point, and bare threads as the limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

import evenstep
from evenstep.bench import fresh

DEVICES = ("cpu:0", "cpu:1")

Job = Mapping[str, Any]


def run(measure: Callable[[Job], dict[str, Any]]) -> None:
    """Measure the job in the first argument and print the result."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fresh.answer(measure)


def open_contender(job: Job) -> Any:
    """Return what runs the tasks: evenstep's engine, or bare threads."""
    return evenstep.Engine(devices=DEVICES) if job["contender"] == "engine" else BareThreads()


class BareThreads(contextlib.ExitStack):
    """A thread with a queue for each device and nothing else: the limit for any engine on threads.

    Each has one intra-op thread, as the engine's devices have here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads = {
            name: self.enter_context(ThreadPoolExecutor(1, initializer=_use_one_thread))
            for name in DEVICES
        }
        self._running: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any, device: str) -> Future[Any]:
        """Call `function` in the thread of a device, after what was submitted there before."""
        self._running.append(self._threads[device].submit(function, *arguments))
        return self._running[-1]

    def waitall(self) -> None:
        """Wait for all calls; raise the first error."""
        running, self._running = self._running, []
        for future in running:
            future.result()


def _use_one_thread() -> None:
    torch.get_num_threads()  # a thread's first use of torch would undo the setting
    torch.set_num_threads(1)
