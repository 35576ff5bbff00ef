"""Gradients of several machines: summed inside each first, so that a cable carries a byte once."""

import contextlib
import datetime
import itertools
import os
import threading

import pytest
import torch
import torch.distributed as dist

from crowds import LIMIT_S, figures, on_machines
from evenstep.collectives import connect, forest, tree_sum
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.machines.meeting import (
    StoreRounds,
    machines_of,
    neighbours,
    place_of_meeting,
)
from evenstep.distributed.machines.reduce import MachineReducer, gradient_reducer
from evenstep.distributed.machines.rounds import join_machines
from evenstep.distributed.process_group import Exchange
from evenstep.distributed.secret import SealedStore
from evenstep.distributed.shared import rounds as shared_rounds
from evenstep.errors import PeerError
from launched import alone
from over_threads import Counting, on_each, peers_over
from reference import assert_same_bits

PARAMETERS = [torch.empty(1000), torch.empty(3, 5, dtype=torch.float64), torch.empty(37)]
EVERYBODY = Exchange("step", "its part")


class Present:
    """Stands for locks, which the threads of one process don't keep from each other."""

    def __init__(self, handle, rank):
        self._handle = handle

    def is_gone(self, rank):
        return False

    def close(self):
        os.close(self._handle)


@pytest.fixture(autouse=True)
def _everybody_is_present(monkeypatch):
    monkeypatch.setattr(shared_rounds, "Locks", Present)


class Job:
    """Processes on machines of these sizes, played by threads."""

    def __init__(self, *sizes, made=Counting):
        ends = [0, *itertools.accumulate(sizes)]
        self.machines = [range(*pair) for pair in itertools.pairwise(ends)]
        self.size = ends[-1]
        self.store = dist.HashStore()
        self.columns = [
            [*map(made, connect(len(sizes), timeout_s=20.0))] for _ in range(min(sizes))
        ]
        self.everywhere = connect(self.size)

    def joined(self, rank):
        """Return the processes as one of them sees them."""

        def rounds(name, number, size):
            return StoreRounds(SealedStore(self.store, b"key"), name, number, size, 20.0)

        def inside(ranks):
            return rounds(f"machine/{ranks.start}", ranks.index(rank), len(ranks))

        def column(name, number, _):
            return self.columns[int(name.rpartition("/")[2])][number]

        peers = peers_over(self.everywhere[rank])
        meeting = rounds("meeting", rank, self.size)
        peers.rounds = join_machines(peers, self.machines, meeting, inside, column, 20.0)
        return peers

    def sent(self):
        """Return the bytes that the processes of each machine have sent to other machines."""
        return [
            sum(column[number].sent for column in self.columns)
            for number in range(len(self.machines))
        ]


def values(shard):
    """Return the gradients of a shard; added in another order they have other bits."""
    drawn = torch.Generator().manual_seed(shard)
    return [
        None if (shard + i) % 5 == 4 else torch.randn(one.shape, generator=drawn, dtype=one.dtype)
        for i, one in enumerate(PARAMETERS)
    ]


def added(left, right):
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def reducer_of(peers, trees):
    """Return the reducer of a process, with several buckets, some of which go in pieces."""
    flats = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    reducer = gradient_reducer(peers, flats, on_cpus=True)
    assert isinstance(reducer, MachineReducer)
    reducer.bucket_bytes, reducer.buckets = 64, flats.buckets(64)
    assert len(reducer.buckets) == len(PARAMETERS)
    reducer.reserve(trees, 0)
    return reducer


def partials_of(trees, rank):
    """Return the partial sums of a process."""
    leaves = [values(shard) for shard in range(trees.shards)]
    spans = [trees.spans[number] for number in trees.partials_of(rank)]
    return [[*tree_sum(leaves[one.start : one.stop], added)] for one in spans]


def total_of(peers, reduction):
    """Return the sum, when every process has written its part."""
    peers.gather(b"", EVERYBODY)
    return {str(i): one.clone() for i, one in reduction.gradients(torch.device("cpu"))}


def summed(job, trees, steps=1):
    """Return the sums that each process gets."""

    def run(rank):
        peers = job.joined(rank)
        reducer = reducer_of(peers, trees)
        for step in range(steps):
            reduction = reducer.begin(trees, len(PARAMETERS), step)
            reduction.write_rest(partials_of(trees, rank))
            found = total_of(peers, reduction)
        reducer.close()
        return found

    return on_each(range(job.size), run)


def sum_in_one_place(shards):
    whole = tree_sum([values(shard) for shard in range(shards)], added)
    return {str(i): one for i, one in enumerate(whole)}


LAYOUTS = [
    ((2, 2), 8, [2, 2, 2, 2]),
    ((2, 2), 8, [1, 4, 0, 3]),
    ((2, 2), 3, [1, 1, 1, 0]),
    ((3, 1), 7, [1, 2, 1, 3]),
    ((1, 2, 1), 5, [2, 1, 1, 1]),
    ((2, 3, 2), 16, [3, 1, 4, 1, 0, 5, 2]),
    ((4, 4), 2, [1, 1, 0, 0, 0, 0, 0, 0]),
    ((8, 8), 16, [1] * 16),
]


@pytest.mark.parametrize(("sizes", "shards", "lengths"), LAYOUTS)
def test_the_sum_has_the_bits_of_one_place(sizes, shards, lengths):
    ends = [0, *itertools.accumulate(lengths)]
    trees = forest(shards, shards, tuple(range(*pair) for pair in itertools.pairwise(ends)))
    for found in summed(Job(*sizes), trees, steps=2):
        assert_same_bits(found, sum_in_one_place(shards))


FOUR = forest(8, 8, tuple(range(2 * rank, 2 * rank + 2) for rank in range(4)))


class Noticed(Counting):
    """A transport that notices the first gradients that it sends."""

    def __init__(self, transport):
        super().__init__(transport)
        self.has_sent = threading.Event()

    def send(self, tensor, to, tag=0):
        if tag:
            self.has_sent.set()
        return super().send(tensor, to, tag)


def on_two_machines(function, made=Counting):
    """Return `function(rank, peers, reducer)` of the four processes of two machines."""
    job = Job(2, 2, made=made)

    def run(rank):
        peers = job.joined(rank)
        reducer = reducer_of(peers, FOUR)
        try:
            return function(rank, peers, reducer)
        finally:
            reducer.close()

    return on_each(range(4), run)


def begun(reducer):
    return reducer.begin(FOUR, len(PARAMETERS), 0)


def test_processes_meet_though_some_have_met_more_often():
    """Their launcher starts them again, and its store stays, with what dead ones have asked."""
    job = dist.HashStore()

    def meet(rank, size, timeout_s=20.0):
        own = place_of_meeting(job, rank, size, timeout_s)
        own.set(f"here/{rank}", "")
        own.wait([f"here/{peer}" for peer in range(size)], datetime.timedelta(seconds=20))

    def alone(rank):
        with pytest.raises(PeerError, match=rf"^rank {1 - rank} did not respond within 0\.3 s: "):
            meet(rank, 2, timeout_s=0.3)

    for lost in (0, 0, 1, 1):
        alone(lost)
        on_each(range(2), lambda rank: meet(rank, 2))
    meet(0, 1)
    for _ in range(3):
        on_each(range(3), lambda rank: meet(rank, 3))


def test_a_bucket_crosses_the_cable_while_others_are_computed():
    def run(rank, peers, reducer):
        reduction = begun(reducer)
        last = len(reduction.buckets) - 1
        (own,) = partials_of(FOUR, rank)
        reduction.write(last, 0, [own[i] for i in reduction.buckets[last].numbers])
        has_crossed = peers.rounds.machines.column.has_sent.wait(20)
        reduction.write_rest([own])
        return has_crossed, total_of(peers, reduction)

    for has_crossed, found in on_two_machines(run, Noticed):
        assert has_crossed
        assert_same_bits(found, sum_in_one_place(8))


def test_a_bucket_waits_for_all_processes_of_its_machine():
    others_have_written = threading.Barrier(4)

    def run(rank, peers, reducer):
        reduction = begun(reducer)
        if rank != 1:
            reduction.write_rest(partials_of(FOUR, rank))
        others_have_written.wait(20)
        has_sent = peers.rounds.machines.column.has_sent.wait(20 if rank > 1 else 0.2)
        others_have_written.wait(20)
        if rank == 1:
            reduction.write_rest(partials_of(FOUR, rank))
        return has_sent, total_of(peers, reduction)

    both = on_two_machines(run, Noticed)
    assert [has_sent for has_sent, _ in both] == [False, False, True, True]
    for _, found in both:
        assert_same_bits(found, sum_in_one_place(8))


def test_after_a_reduction_that_was_dropped_the_next_one_has_the_right_bits():
    def run(rank, peers, reducer):
        dropped = begun(reducer)
        if rank % 2:
            dropped.write_rest(partials_of(FOUR, (rank + 1) % 4))
        dropped.drop()
        again = begun(reducer)
        again.write_rest(partials_of(FOUR, rank))
        return total_of(peers, again)

    for found in on_two_machines(run):
        assert_same_bits(found, sum_in_one_place(8))


def test_everybody_ends_if_one_leaves_with_buckets_unsent_and_its_neighbour_names_it():
    def run(rank, peers, reducer):
        reduction = begun(reducer)
        if rank == 2:
            return peers.close()
        reduction.write_rest(partials_of(FOUR, rank))
        with pytest.raises(PeerError, match="rank ") as caught:
            reduction.total()
        peers.close()
        return caught.value.rank

    assert on_two_machines(run)[3] == 2


def test_each_process_of_a_machine_knows_what_all_others_say():
    job = Job(2, 3, 1)

    def gathered(rank):
        peers = job.joined(rank)
        return [
            peers.gather(bytes([rank]) * (length * (1 + rank)), EVERYBODY)
            for length in (0, 1, 30_000)
        ]

    expected = [
        [bytes([rank]) * (length * (1 + rank)) for rank in range(6)] for length in (0, 1, 30_000)
    ]
    assert on_each(range(6), gathered) == [expected] * 6


WIDTH = 8192


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (1,) * 8, (2, 2, 2, 2)], ids=str)
def test_a_cable_carries_what_one_process_for_each_machine_would_send(sizes, rate, tmp_path):
    """However many processes a machine has; measured at its end of the cable."""
    finished = alone("crowd.py", tmp_path, 8, 8, WIDTH)
    assert finished.returncode == 0, finished.stderr
    (expected,) = figures(tmp_path, 1)
    found = on_machines(tmp_path, sizes, rate, 8, 8, WIDTH)
    assert {one["fingerprint"] for one in found} == {expected["fingerprint"]}
    machines = len(sizes)
    least = 2 * expected["gradient_bytes"] * (machines - 1) / machines
    for one in found:
        for nbytes in one["cable"]:
            assert least < nbytes < 1.1 * least  # with headers, acknowledgements and reports


def test_neighbours_are_processes_that_follow_one_another_in_one_place():
    assert neighbours(["a", "a", "b", "a"]) == [range(2), range(2, 3), range(3, 4)]


@pytest.mark.parametrize("reached", [True, False])
def test_processes_whose_places_have_one_name_are_neighbours_only_if_they_reach_each_other(
    monkeypatch, reached
):
    """Two machines may have the same names, such as copies of one image."""
    if not reached:
        connected = "evenstep.distributed.machines.meeting.connected"
        monkeypatch.setattr(connected, lambda name: contextlib.nullcontext(None))
    store = dist.HashStore()

    def met(rank):
        rounds = StoreRounds(SealedStore(store, b"key"), "meeting", rank, 3, 20.0)
        return machines_of(rounds, rank)[1]

    expected = [range(3)] if reached else [range(rank, rank + 1) for rank in range(3)]
    assert on_each(range(3), met) == [expected] * 3


def test_who_leaves_is_named_by_its_rank_among_all_to_its_neighbour():
    job = Job(2, 2)

    def run(rank):
        peers = job.joined(rank)
        if rank == 2:
            return peers.close()
        with pytest.raises(PeerError) as caught:
            peers.gather(b"", EVERYBODY)
        peers.close()
        return caught.value.rank

    assert on_each(range(4), run)[3] == 2
