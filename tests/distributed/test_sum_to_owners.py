"""The sum of gradients at their owners: its bits, and the memory that it takes meanwhile."""

import threading
from concurrent.futures import wait

import pytest
import torch

from evenstep.collectives import forest
from evenstep.distributed.owners import reduce
from evenstep.distributed.owners.reduce import ReducerToOwners
from evenstep.distributed.owners.space import OwnerSpace
from over_threads import on_each_of, peers_over
from patience import HUNG_TESTS_ABORT, PATIENCE_S

pytestmark = HUNG_TESTS_ABORT

BUCKETS = 12
PARAMETERS = [torch.zeros(8) for _ in range(BUCKETS)]


def reduced(write, size=2):
    """Return the sums of each process, whose `write(reduction, rank)` writes all buckets."""

    def run(transport):
        rank = transport.rank
        owner_of = [i % size for i in range(BUCKETS)]
        space = OwnerSpace(PARAMETERS, range(BUCKETS), owner_of, 1)
        reducer = ReducerToOwners(peers_over(transport), space)
        runs = tuple(range(one, one + 1) for one in range(size))
        reduction = reducer.begin(forest(size, size, runs), BUCKETS, 0)
        try:
            write(reduction, rank)
            return {i: total.tolist() for i, total in reduction.gradients(torch.device("cpu"))}
        finally:
            reducer.close()

    return on_each_of(size, run)


def put(reduction, rank, bucket):
    (number,) = reduction.buckets[bucket].numbers
    reduction.write(bucket, 0, [torch.full((8,), 10.0**rank * (number + 1))])


def expected(size=2):
    ones = sum(10**rank for rank in range(size))
    return [
        {i: [ones * (i + 1.0)] * 8 for i in range(BUCKETS) if i % size == rank}
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_backward_passes_may_complete_the_buckets_in_any_order(size, monkeypatch):
    """Each process comes last to what another one begins with: no process may wait for that."""
    monkeypatch.setattr(reduce, "_PATIENCE_S", 10 * PATIENCE_S)

    def write(reduction, rank):
        first = rank * BUCKETS // size
        for bucket in [*range(first, BUCKETS), *range(first)]:
            put(reduction, rank, bucket)

    assert reduced(write, size) == expected(size)


def test_a_fast_process_waits_with_few_buckets_under_way(monkeypatch):
    ahead, waits, put_by_first = [], threading.Event(), []

    def watched(under_way, timeout):
        ahead.append(len(put_by_first))
        waits.set()
        return wait(under_way, timeout)

    def write(reduction, rank):
        if rank:
            assert waits.wait(PATIENCE_S)
        for bucket in range(BUCKETS):
            put(reduction, rank, bucket)
            if not rank:
                put_by_first.append(bucket)

    monkeypatch.setattr(reduce, "wait", watched)
    assert reduced(write) == expected()
    assert ahead[0] == reduce._UNDER_WAY


def test_a_lane_does_not_wait_for_long(monkeypatch):
    monkeypatch.setattr(reduce, "_PATIENCE_S", 0.05)
    all_written = threading.Event()

    def write(reduction, rank):
        if rank:
            assert all_written.wait(PATIENCE_S)
        for bucket in range(BUCKETS):
            put(reduction, rank, bucket)
        all_written.set()

    assert reduced(write) == expected()
