"""Minibatches cut into shards: boundaries, refused batches, and the tensors of a shard."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.batch import contiguous_runs, count_examples, cut_batch, shard_bounds, shared
from evenstep.batch.cut import without_examples
from evenstep.devices import Device, carry
from evenstep.errors import BatchError, ContractError
from launched import alone

Pair = collections.namedtuple("Pair", ["left", "right"])


def message(call, *arguments):
    with pytest.raises(BatchError) as caught:
        call(*arguments)
    return str(caught.value)


@given(examples=st.integers(0, 3000), shards=st.integers(1, 300))
def test_bounds_are_those_of_array_split(examples, shards):
    pieces = np.array_split(np.arange(examples), shards)
    bounds = shard_bounds(examples, shards)
    assert [list(range(lo, hi)) for lo, hi in bounds] == [piece.tolist() for piece in pieces]
    assert bounds[-1][1] == examples


def test_empty_shards_are_the_last_ones():
    assert shard_bounds(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("shards", [0, -3])
def test_no_shards_are_refused(shards):
    assert message(shard_bounds, 5, shards) == f"got {shards} shards: at least 1 is needed"


@given(items=st.lists(st.integers()), parts=st.integers(1, 40))
def test_runs_are_contiguous_and_even(items, parts):
    runs = contiguous_runs(items, [0.3] * parts)
    assert len(runs) == parts
    assert [item for run in runs for item in run] == items
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(
    items=st.lists(st.integers()),
    speeds=st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any),
)
def test_the_lengths_of_runs_are_in_proportion_to_speeds(items, speeds):
    runs = contiguous_runs(items, speeds)
    assert [item for run in runs for item in run] == items
    for run, speed in zip(runs, speeds, strict=True):
        assert abs(len(run) - len(items) * speed / sum(speeds)) < 1 + 1e-6
    assert all(
        len(run) <= (speed > 0) * len(items) for run, speed in zip(runs, speeds, strict=True)
    )


@pytest.mark.parametrize(
    ("speeds", "lengths"),
    [
        ([3, 1], [6, 2]),
        ([1, 3], [2, 6]),
        ([1, 0], [8, 0]),
        ([2, 1, 1], [4, 2, 2]),
        ([20, 1], [8, 0]),
    ],
)
def test_a_fast_device_gets_a_longer_run(speeds, lengths):
    assert [len(run) for run in contiguous_runs(range(8), speeds)] == lengths


X, Y = torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X,),
        [X, Y],
        (X, [Y, Y]),
        {"input": X, "more": {"mask": Y}},
        Pair(X, (Y, {"z": X})),
        (X, None),
        collections.OrderedDict(b=X, a=Y),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_examples_of_any_nesting(batch):
    assert count_examples(batch) == 6


SHARED = "; give one that every shard needs whole as evenstep.shared(tensor)"
NO_TENSOR = "got a batch without tensors: give at least one, examples first"
REFUSED = [
    ((), NO_TENSOR),
    ([], NO_TENSOR),
    ({}, NO_TENSOR),
    ((None, {"mask": None}), NO_TENSOR),
    ((X, torch.zeros(5)), "batch[0] has 6, batch[1] has 5" + SHARED),
    ({"x": X, "y": {"z": Y[:1]}}, "batch['x'] has 6, batch['y']['z'] has 1" + SHARED),
    ([X, (Y, Y[1:])], "batch[0] has 6, batch[1][0] has 6, batch[1][1] has 5" + SHARED),
    (Pair(X, Y[:0]), "batch[0] has 6, batch[1] has 0" + SHARED),
    ((X, 3), "batch[1] is of type int: give tensors, examples first"),
    ((X, {6}), "batch[1] is of type set: give tensors, examples first"),
    ({"x": X, "names": ["a"]}, "batch['names'][0] is of type str: give tensors, examples first"),
    ((X, torch.tensor(3)), "batch[1] is a single number: give tensors, examples first, or"),
    ((X[:0], Y[:0]), "got a batch of 0 examples: skip it, or drop the last batch"),
]


@pytest.mark.parametrize(("batch", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_a_batch_that_can_not_be_cut_is_refused_by_name(batch, text):
    assert text in message(count_examples, batch)
    assert text in message(cut_batch, batch, 3)


def place(examples):
    return carry(examples, Device("cpu", 0), torch.contiguous_format)


@pytest.mark.parametrize(("shards", "shard"), [(1, 0), (2, 1), (3, 0), (3, 2), (7, 6), (9, 6)])
def test_a_shard_is_a_copy_of_exactly_its_examples(shards, shard):
    lo, hi = shard_bounds(7, shards)[shard]
    source = {"x": torch.arange(7 * 3.0).reshape(7, 3), "y": Pair(torch.arange(7), torch.ones(7))}
    expected = source["x"].tolist()[lo:hi], source["y"].left.tolist()[lo:hi]
    cut = cut_batch(source, shards)
    assert cut.bounds == shard_bounds(7, shards)
    assert cut.filled == min(7, shards)
    shard = cut.take(shard, place)
    source["x"].zero_()  # a view would follow
    source["y"].left.zero_()
    assert isinstance(shard["y"], Pair)
    assert (shard["x"].tolist(), shard["y"].left.tolist()) == expected
    for tensor in (shard["x"], *shard["y"]):
        assert len(tensor) == hi - lo
        assert tensor.is_contiguous()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0


def test_a_view_of_the_batch_would_not_be_aligned():
    """`place` gets an unaligned view, so the test above can fail."""
    seen = []
    cut = cut_batch(torch.arange(7 * 3.0).reshape(7, 3), 7)
    cut.take(1, lambda view: seen.append(view) or view)
    assert seen[0].data_ptr() % 64 == 12


# Tensors that every shard gets whole

WHOLE = torch.arange(6.0).reshape(6, 1)  # as many rows as the batch has examples


def test_a_shared_tensor_is_not_cut():
    cut = cut_batch({"x": X, "more": [shared(WHOLE), shared(torch.tensor(3))]}, 4)
    for shard in range(4):
        batch = cut.take(shard, place)
        assert batch["x"].shape == (len(range(6)[slice(*cut.bounds[shard])]), 2)
        assert batch["more"][0].equal(WHOLE)
        assert batch["more"][1].item() == 3


def test_a_device_gets_one_copy_of_a_shared_tensor():
    cut = cut_batch((X, shared(WHOLE)), 3)
    taken = [cut.take(shard, place)[1] for shard in range(3)]
    assert len({tensor.data_ptr() for tensor in taken}) == 1
    assert taken[0].data_ptr() != WHOLE.data_ptr()
    elsewhere = cut.take(0, lambda view: view.clone())[1]
    assert elsewhere.data_ptr() != taken[0].data_ptr()


def test_a_write_to_the_copy_of_a_shared_tensor_is_refused():
    cut = cut_batch((X, shared(WHOLE)), 3)
    copy = cut.take(0, place)[1]
    cut.refuse_written_copies()
    copy.add_(1)
    with pytest.raises(ContractError, match=r"wrote to the tensor of shape \(6, 1\)"):
        cut.refuse_written_copies()
    assert WHOLE[5].item() == 5


def test_a_shared_tensor_that_was_written_to_is_noticed():
    whole = WHOLE.clone()
    cut = cut_batch((X, shared(whole)), 3)
    cut.check_unchanged()
    whole.zero_()
    with pytest.raises(BatchError, match="the batch was written to"):
        cut.check_unchanged()


def test_examples_are_those_of_the_other_tensors():
    assert count_examples((X, shared(torch.zeros(2, 2)))) == 6


def test_a_batch_of_shared_tensors_alone_is_refused():
    assert message(cut_batch, {"w": shared(WHOLE)}, 3) == (
        "got a batch of nothing but shared tensors: give at least one that has examples"
    )


def test_only_a_tensor_can_be_shared():
    assert message(shared, [WHOLE]) == "evenstep.shared got a value of type list: give one tensor"


# Examples along another dimension

SEQUENCES = torch.arange(4 * 7 * 2.0).reshape(4, 7, 2)  # (time, batch, features)
LABELS = torch.arange(7)


@pytest.mark.parametrize("shards", [1, 3, 9])
def test_a_batch_is_cut_along_another_dimension(shards):
    cut = cut_batch((SEQUENCES, LABELS), shards, dim=1)
    assert cut.bounds == shard_bounds(7, shards)
    for shard in range(cut.filled):
        lo, hi = cut.bounds[shard]
        sequences, labels = cut.take(shard, place)
        assert sequences.equal(SEQUENCES[:, lo:hi])
        assert labels.equal(LABELS[lo:hi])
        assert sequences.is_contiguous()


def test_tensors_that_disagree_along_another_dimension_are_named():
    assert message(lambda: cut_batch((SEQUENCES, LABELS[1:]), 3, dim=1)) == (
        "the tensors of a batch need the same number of examples (dimension 1, or the first of a "
        "tensor without it), but batch[0] has 7, batch[1] has 6; give one that every shard needs "
        "whole as evenstep.shared(tensor)"
    )


@pytest.mark.parametrize(
    ("batch", "dim", "place"),
    [
        ((X, torch.zeros(2, 6, 4)), 0, "batch[1] has 2"),
        ((SEQUENCES, torch.zeros(7, 2)), 1, "batch[1] has 2"),
    ],
    ids=["layers first", "examples first"],
)
def test_a_state_with_its_examples_elsewhere_is_to_be_transposed(batch, dim, place):
    text = message(lambda: cut_batch(batch, 3, dim=dim))
    assert place in text
    assert text.endswith(
        f"; batch[1] has {6 if dim == 0 else 7} along dimension {1 - dim}: give "
        f"batch[1].transpose(0, 1) if these are the examples (as in a recurrent state), or one "
        f"that every shard needs whole as evenstep.shared(tensor)"
    )


def test_a_batch_without_examples_keeps_everything_else():
    sequences, labels, whole = without_examples((SEQUENCES, LABELS, shared(WHOLE)), dim=1)
    assert (sequences.shape, labels.shape) == ((4, 0, 2), (0,))
    assert whole.tensor is WHOLE
    assert without_examples(SEQUENCES).shape == (0, 7, 2)


@pytest.mark.slow
def test_threads_may_read_a_cut_during_a_garbage_collection():
    job = alone("read_during_collection.py", fresh=True)  # with a collector that knows everything
    assert (job.returncode, job.stdout) == (0, "ok\n"), job.stderr
