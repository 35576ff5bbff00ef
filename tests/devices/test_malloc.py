"""Freed memory is kept while a trainer is open, and given back afterwards.

Each measurement has a process of its own: what another test left in the heap would be counted too.
"""

import json
import subprocess
import sys

import pytest

from evenstep.devices.malloc import _glibc

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or _glibc() is None, reason="malloc is not glibc's here"
)

MEASURE = """
import json, resource
import torch
from evenstep.devices import kept_memory

NBYTES = 16 << 20

def work():
    held = [torch.ones(NBYTES // 4) for _ in range(3)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

start = resident()
with kept_memory():
    for _ in range(5):
        work()
    before = faults()
    for _ in range(30):
        work()
    reused_faults = faults() - before
    kept_nbytes = resident() - start
print(json.dumps({
    "mapped_nbytes": reused_faults * resource.getpagesize(),
    "worked_nbytes": 30 * 3 * NBYTES,
    "kept_nbytes": kept_nbytes,
    "left_nbytes": resident() - start,
}))
"""


def measure():
    command = [sys.executable, "-c", MEASURE]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_memory_is_reused_without_being_mapped_again():
    """Left to itself, malloc maps two thirds of it anew in about every second process."""
    kept = measure()
    assert kept["mapped_nbytes"] < kept["worked_nbytes"] / 20


def test_memory_goes_back_when_closed():
    kept = measure()
    assert kept["kept_nbytes"] > 40 << 20
    assert kept["left_nbytes"] < kept["kept_nbytes"] / 4
