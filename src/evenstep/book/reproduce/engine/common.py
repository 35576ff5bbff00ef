"""What the experiments share: devices, the job, the line, and bare threads to compare with."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

DEVICES = ("cpu:0", "cpu:1")

Job = Mapping[str, Any]


def run(measure: Callable[[Job], dict[str, Any]]) -> None:
    """Measure what the first argument asks for, and print the line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(measure(json.loads(sys.argv[1]))))


class BareThreads:
    """Threads with a queue each and nothing else: the limit for anything built on threads.

    Each has one intra-op thread, as the engine's devices have here.
    """

    def __init__(self, count: int = len(DEVICES)) -> None:
        self._inboxes = [queue.SimpleQueue[Callable[[], object] | None]() for _ in range(count)]
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(inbox,), daemon=True)
            for inbox in self._inboxes
        ]
        self._running = 0

    def __enter__(self) -> BareThreads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def start(self, thread: int, function: Callable[[], object]) -> None:
        """Have a thread call `function`, after what it was given before."""
        self._running += 1
        self._inboxes[thread].put(function)

    def wait(self) -> None:
        """Wait for all that was started."""
        while self._running:
            error = self._done.get()
            self._running -= 1
            if error is not None:
                raise error

    def _work(self, inbox: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        torch.get_num_threads()  # a thread's first use of torch would undo the setting
        torch.set_num_threads(1)
        while (function := inbox.get()) is not None:
            self._done.put(_error_of(function))


def _error_of(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except BaseException as error:
        return error
    return None
