"""Results that torch's own kernels would make depend on the number of threads."""

import pytest
import torch

import evenstep

COUNT = 200_000
PLACES = torch.arange(COUNT) * 7919 % 1009
ROWS = torch.arange(4000) * 7919 % 53
ZEROS = torch.where(torch.arange(COUNT) * 7919 % 10007 < 5003, 0.0, -0.0)


def put_rows():
    return torch.zeros(53, 50).index_put((ROWS,), torch.arange(200_000.0).view(4000, 50))


def put_across():
    numbers = torch.zeros(50, 3, 53)
    numbers[:, ROWS % 3, ROWS] = torch.arange(200_000.0).view(50, 4000)
    return numbers


def put_from_the_end():
    numbers = torch.zeros(1009, dtype=torch.int64)
    numbers[PLACES - 1009] = torch.arange(COUNT)
    return numbers


def put_flat():
    return torch.zeros(1009).put(PLACES, torch.arange(float(COUNT)))


def copied_slices():
    return torch.zeros(50, 53).index_copy(1, ROWS, torch.arange(200_000.0).view(50, 4000))


PUT = (put_rows, put_across, put_from_the_end, put_flat, copied_slices)
EXTREMES = ("max", "min", "amax", "amin", "aminmax")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("put", PUT, ids=lambda put: put.__name__)
def test_of_several_numbers_for_one_place_the_last_stays(put, threads):
    threads(1)
    expected = put()  # torch's own, one after the other
    for count in (1, 2, 4):
        threads(count)
        with evenstep.portable():
            assert torch.equal(put(), expected)


def test_an_index_that_is_out_of_bounds_is_refused():
    with evenstep.portable(), pytest.raises(IndexError):
        torch.zeros(1008).index_put((PLACES,), torch.ones(COUNT))


@pytest.mark.parametrize("name", EXTREMES)
def test_a_zero_is_positive_whatever_the_threads(name, threads):
    for count in (1, 2, 3):
        threads(count)
        with evenstep.portable():
            found = getattr(torch, name)(ZEROS)
        for one in (found,) if isinstance(found, torch.Tensor) else found:
            assert one == 0
            assert not one.signbit()
