"""Gradients that processes of one machine sum in shared memory."""

import torch

from evenstep.collectives import connect, forest
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.shared import reduce
from evenstep.distributed.shared.reduce import SharedMemoryReducer
from over_threads import on_each, peers_over
from reference import assert_same_bits

PARAMETERS = [torch.empty(3, 5), torch.empty(7, dtype=torch.float64)]
TREES = forest(2, 2, (range(1), range(1, 2)))


def reducers():
    def made(end):
        flats = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
        reducer = SharedMemoryReducer(peers_over(end), flats, 1 << 20)
        reducer.reserve(TREES, 0)
        return reducer

    return on_each(connect(2), made)


def written(reducer, value):
    reduction = reducer.begin(TREES, len(PARAMETERS), 0)
    reduction.write_rest([[torch.full_like(one, value) for one in PARAMETERS]])
    return reduction


def sums(reduction):
    return {str(i): view for i, view in reduction.gradients(torch.device("cpu"))}


def test_a_process_that_is_a_step_ahead_leaves_small_sums_as_they_are():
    first, second = reducers()
    for step in range(3):
        ours, theirs = written(first, 1.0 + step), written(second, 0.25)
        expected = {str(i): torch.full_like(one, 1.25 + step) for i, one in enumerate(PARAMETERS)}
        assert_same_bits(sums(ours), expected)
        written(first, 100.0)  # of the next step, which the second process is still before
        assert_same_bits(sums(theirs), expected)


def test_large_sums_are_added_up_in_chunks(monkeypatch):
    monkeypatch.setattr(reduce, "SMALL_BYTES", 0)
    pair = [*zip(reducers(), (1.0, 0.25), strict=True)]
    expected = {str(i): torch.full_like(one, 1.25) for i, one in enumerate(PARAMETERS)}

    def summed(one):
        reduction = written(*one)
        one[0].peers.gather(b"", reduce.Exchange("step", "its part"))
        return sums(reduction)

    for found in on_each(pair, summed):
        assert_same_bits(found, expected)
