"""Freed memory is kept while a context is open, and returned when the last one closes.

Each measurement runs in a process of its own: the heap would show what another test left in it.
"""

import json
import subprocess
import sys
import threading

import pytest

from evenstep.devices import kept_memory, malloc
from marks import slow

needs_glibc = pytest.mark.skipif(
    sys.platform != "linux" or malloc._glibc() is None, reason="malloc is not glibc's here"
)

MEASURE = """
import contextlib, json, resource, sys
import torch
from evenstep.devices import kept_memory

NBYTES = 16 << 20
ROUNDS = 30

def work():
    held = [torch.ones(NBYTES // 4) for _ in range(3)]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def mapped():
    for _ in range(5):
        work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        work()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults * resource.getpagesize() / (ROUNDS * 3 * NBYTES)

start = resident()
measured = {}
with contextlib.ExitStack() as outer:
    if "overlapping" in sys.argv:
        first = outer.enter_context(contextlib.ExitStack())
        first.enter_context(kept_memory())
        outer.enter_context(kept_memory())
        first.close()
    else:
        outer.enter_context(kept_memory())
    measured["mapped_share"] = mapped()
    measured["kept_nbytes"] = resident() - start
measured["left_nbytes"] = resident() - start
measured["mapped_share_afterwards"] = mapped()
print(json.dumps(measured))
"""


@needs_glibc
@pytest.mark.parametrize("how", ["once", slow("overlapping")])
def test_memory_is_reused_and_goes_back_at_the_end(how):
    """Without it, malloc maps two thirds of the memory anew in about every second process.

    Afterwards, with glibc's initial thresholds, it would map all of it: its adaptation stays off.
    """
    command = [sys.executable, "-c", MEASURE, how]
    kept = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert kept["mapped_share"] < 1 / 20
    assert kept["kept_nbytes"] > 40 << 20
    assert kept["left_nbytes"] < kept["kept_nbytes"] / 4
    assert kept["mapped_share_afterwards"] < 1 / 20


class Recorder:
    """A stand-in for glibc that records what is set."""

    def __init__(self):
        self.set = {}
        self.trims = 0

    def mallopt(self, parameter, value):
        self.set[parameter] = value

    def malloc_trim(self, pad):
        self.trims += 1


@pytest.fixture
def libc(monkeypatch):
    libc = Recorder()
    monkeypatch.setattr(malloc, "_glibc", lambda: libc)
    return libc


AFTERWARDS = {**malloc._WHILE_OPEN, **malloc._AFTERWARDS}


def test_the_last_user_restores_the_parameters(libc):
    first, second = kept_memory(), kept_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert libc.set == malloc._WHILE_OPEN
    assert libc.trims == 0
    second.__exit__(None, None, None)
    assert libc.set == AFTERWARDS
    assert libc.trims == 1
    with kept_memory():
        assert libc.set == malloc._WHILE_OPEN
    assert libc.trims == 2


def test_users_in_many_threads_are_counted(libc):
    def use():
        for _ in range(200):
            with kept_memory():
                seen.append(libc.set[malloc._M_ARENA_MAX])

    seen = []
    with kept_memory():
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert libc.trims == 0
    assert set(seen) == {1}
    assert libc.set == AFTERWARDS


def test_an_error_inside_restores_the_parameters(libc):
    with pytest.raises(ZeroDivisionError), kept_memory():
        _ = 1 / 0
    assert libc.set == AFTERWARDS


def test_switched_off_it_sets_nothing(libc):
    with kept_memory(enabled=False):
        pass
    assert libc.set == {}
    assert libc.trims == 0


def test_without_glibc_it_does_nothing(monkeypatch):
    monkeypatch.setattr(malloc, "_glibc", lambda: None)
    with kept_memory():
        pass
