"""Many tensors in few vectors, and back."""

import pytest
import torch

from evenstep.distributed.flat_buffers import FlatSpace
from reference import assert_same_bits

PARAMETERS = [
    torch.empty(3, 5),
    torch.empty(7, dtype=torch.float64),
    torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.empty(()),
    torch.empty(2, dtype=torch.complex64),
    torch.empty(6, 4).t(),
]


def random_like(parameter):
    return torch.randn_like(parameter)


def fill(space, vectors, left, right=None):
    for bucket in space.buckets(40):
        own = [[side[i] for i in bucket.numbers] for side in (left, right) if side is not None]
        space.write(dict(space.views(vectors)), bucket, *own)


def test_gradients_come_back_as_they_were():
    space = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    gradients = [random_like(parameter) for parameter in PARAMETERS]
    vectors = space.new()
    assert [vector.dtype for vector in vectors] == [torch.float32, torch.float64, torch.complex64]
    fill(space, vectors, gradients)
    found = dict(space.views(vectors))
    for i, gradient in enumerate(gradients):
        assert torch.equal(found[i], gradient)
        assert found[i].stride() == gradient.stride()


def test_every_place_is_aligned():
    space = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    for _, view in space.views(space.new()):
        assert view.data_ptr() % 64 == 0


def test_only_the_given_parameters_have_a_place():
    space = FlatSpace(PARAMETERS, [0, 3])
    assert [i for i, _ in space.views(space.new())] == [0, 3]


def test_the_place_of_a_missing_gradient_changes_no_number_added_to_it():
    space = FlatSpace([torch.empty(4)], [0])
    vectors = space.new()
    fill(space, vectors, [None])
    ((_, nothing),) = space.views(vectors)
    numbers = torch.tensor([0.0, -0.0, 1e-45, torch.inf])
    for total in (numbers + nothing, nothing + numbers):
        assert torch.equal(total.view(torch.int32), numbers.view(torch.int32))


def test_vectors_can_lie_in_given_memory():
    space = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    memory = torch.zeros(space.nbytes, dtype=torch.uint8)
    fill(space, space.over(memory), [torch.ones_like(parameter) for parameter in PARAMETERS])
    for _, view in space.views(space.over(memory)):
        assert (view == 1).all()


def test_buckets_cover_every_vector_once_and_each_parameter_is_in_one():
    space = FlatSpace(PARAMETERS, [*reversed(range(len(PARAMETERS)))])
    buckets = space.buckets(200)
    assert sorted(i for bucket in buckets for i in bucket.numbers) == list(range(len(PARAMETERS)))
    for flat, vector in enumerate(space.new()):
        own = [bucket for bucket in buckets if bucket.flat == flat]
        assert [bucket.lo for bucket in own] == [0, *[bucket.hi for bucket in own[:-1]]]
        assert own[-1].hi == len(vector)
        sizes = [(bucket.hi - bucket.lo) * vector.element_size() for bucket in own]
        assert all(size >= 200 for size in sizes[:-1])
    assert len(buckets) > 3


def test_two_sides_are_added_as_torch_adds_them():
    space = FlatSpace(PARAMETERS, range(len(PARAMETERS)))
    left, right = ([random_like(parameter) for parameter in PARAMETERS] for _ in range(2))
    left[1] = right[2] = None
    left[4] = right[4] = None
    vectors = space.new()
    fill(space, vectors, left, right)
    for i, view in space.views(vectors):
        expected = [side[i] for side in (left, right) if side[i] is not None]
        if expected:
            assert_same_bits({"sum": view}, {"sum": sum(expected[1:], start=expected[0])})
        else:
            assert_same_bits({"sum": view}, {"sum": torch.full_like(view, -0.0)})


def rows_of_table(*numbers):
    """Return rows of a table of six: sparse, as `TableRows` gives them."""
    values = torch.randn(len(numbers), 4)
    return torch.sparse_coo_tensor([numbers], values, (6, 4), check_invariants=True).coalesce()


TABLE = {
    "rows": lambda: rows_of_table(1, 3),
    "other rows": lambda: rows_of_table(0, 3, 5),
    "dense": lambda: torch.randn(6, 4),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("left", TABLE)
@pytest.mark.parametrize("right", TABLE)
def test_rows_of_two_sides_are_added_as_dense_gradients_are(left, right):
    space = FlatSpace([torch.empty(6, 4), torch.empty(6, 4)], [0, 1])
    vectors = space.new()
    pairs = [(TABLE[left](), TABLE[right]()) for _ in range(2)]
    dense = [[None if one is None else one.to_dense() for one in two] for two in pairs]
    fill(space, vectors, *zip(*pairs, strict=True))
    for i, view in space.views(vectors):
        given = [one for one in dense[i] if one is not None]
        expected = sum(given[1:], start=given[0]) if given else torch.full((6, 4), -0.0)
        assert_same_bits({"sum": view}, {"sum": expected})
