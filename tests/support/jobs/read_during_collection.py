"""Two threads read an object for the first time, one during the other's garbage collection.

In Python 3.11 the first read of an instance's `__dict__` allocates it, which may collect garbage; a
finalizer that lets another thread run (every tensor's does) may then make it a second `__dict__` of
the same memory, and the process crashes when both are freed.
"""

import gc
import threading
from collections.abc import Callable

import torch

from evenstep.batch import cut_batch
from evenstep.devices import Device

WAIT_S = 20


class LetsOtherRun:
    """Garbage whose finalizer waits until the other thread has read everything."""

    def __init__(self, reading: threading.Event, read: threading.Event) -> None:
        self.reading, self.read, self.itself = reading, read, self

    def __del__(self) -> None:
        self.reading.set()
        assert self.read.wait(WAIT_S)


def read_by_two(value: object, name: str) -> None:
    """Read an attribute of `value` in two threads."""
    reading, read = threading.Event(), threading.Event()

    def other() -> None:
        assert reading.wait(WAIT_S)
        getattr(value, name)
        read.set()

    thread = threading.Thread(target=other)
    thread.start()
    gc.disable()
    LetsOtherRun(reading, read)
    _freed = [{} for _ in range(100)]  # Python keeps up to 80 freed dicts, and gives them again
    gc.set_threshold(1, 1, 1)
    gc.enable()
    getattr(value, name)  # the first thing that is allocated is collected for
    gc.set_threshold(700, 10, 10)
    gc.collect()
    thread.join()


def read_each(make: Callable[[], object]) -> None:
    """Read each public attribute of a new object in two threads."""
    for name in dir(type(make())):
        if not name.startswith("_"):
            read_by_two(make(), name)


if __name__ == "__main__":
    read_each(lambda: cut_batch((torch.zeros(8, 1),), 4))
    read_each(lambda: cut_batch((torch.zeros(8, 1),), 4).part)
    read_each(lambda: Device("cpu", 1))
    gc.collect()
    print("ok")
