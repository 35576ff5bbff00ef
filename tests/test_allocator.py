"""Freed memory is kept while a trainer is open, and given back afterwards."""

import resource
import sys

import pytest
import torch

from evenstep.allocator import _glibc, kept_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or _glibc() is None, reason="malloc is not glibc's here"
)
NBYTES = 16 << 20
PAGES = NBYTES // resource.getpagesize()


def page_faults_of_reuse(times):
    """Return the page faults of allocating, filling and freeing 16 MiB, once it has been done."""
    torch.ones(NBYTES // 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(NBYTES // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_memory_is_reused_without_being_mapped_again():
    with kept_memory():
        assert page_faults_of_reuse(10) < 3 * PAGES  # not 10: once or twice it finds its place


def test_memory_goes_back_when_closed():
    before = resident_nbytes()
    with kept_memory():
        torch.ones(NBYTES // 4)
        torch.ones(NBYTES // 2)
        kept = resident_nbytes() - before
    assert resident_nbytes() - before < kept / 2
