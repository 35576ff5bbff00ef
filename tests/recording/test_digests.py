"""What is kept of tensors: equal for equal bits, other for others, and true of distances."""

import dataclasses
import math

import pytest
import torch

from evenstep.comparison.aligned import distance
from evenstep.comparison.reading import Kept
from evenstep.recording.digests import RecentlyKept, digest_of_starts, sample_of

SHAPES = [(3,), (2048,), (40, 70), (300, 150), (64, 64, 3, 3), (7, 33, 257)]


def kept_of(tensor, examples=None):
    digest, rows, *rest, sketch = RecentlyKept().kept_of(tensor, examples)
    return Kept(digest, rows and int(rows, 16), *rest, sketch and tuple(sketch))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("apart", [1e-5, 1e-2, 1.0])
def test_the_distance_of_two_tensors_is_true_within_a_factor_of_three(shape, apart):
    generator = torch.Generator().manual_seed(1)
    for grows in (False, True):  # values that differ at random, or all in one direction
        one = torch.randn(shape, generator=generator)
        change = torch.rand(shape, generator=generator) + (0.5 if grows else -0.5)
        other = one + apart * change
        true = float((one - other).double().norm() / max(one.norm(), other.norm()))
        assert true / 3 < distance(kept_of(one), kept_of(other)) < 3 * true


def output_of(tensor):
    """Return what is kept of a module's output, with some values of one example."""
    sample = tuple(map(float, sample_of(tensor, 3, len(tensor))))
    return dataclasses.replace(kept_of(tensor, len(tensor)), picked=7, sample=sample)


def test_outputs_are_apart_by_their_sums_their_norms_or_a_sample():
    one = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    one -= one.mean()
    shift = one.norm() / one.numel() ** 0.5
    for other in (one + shift, 2 * one, one.roll(1, 1)):  # the last has the sum and the norm of one
        true = float((one - other).norm() / max(one.norm(), other.norm()))
        assert true / 3 < distance(output_of(one), output_of(other)) < 3 * true


@pytest.mark.parametrize("apart", [1, 2, 2048, 4096, 8192])
def test_two_values_that_change_places_are_another_tensor(apart):
    one = torch.arange(1.0, 9000.0)
    other = one.clone()
    other[[5, 5 + apart]] = one[[5 + apart, 5]]
    assert kept_of(one).digest != kept_of(other).digest
    examples = len(one.reshape(-1, 1))
    assert kept_of(one[None], 1).rows != kept_of(other[None], 1).rows
    assert kept_of(one[:, None], examples).rows == kept_of(other[:, None], examples).rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(6, 4), (64, 64), (8, 4096), (40, 700)], ids=str)
def test_signs_that_change_are_seen(dtype, shape):
    """They are the uppermost bits, and sums of bits are modulo a power of two."""
    one = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    each_second = torch.ones(shape)
    each_second[:, 1::2] = -1
    for other in (-one, one * each_second, one * each_second.flip(1), one * 0, one * -0.0):
        assert kept_of(other).digest != kept_of(one).digest
        assert kept_of(other, len(one)).rows != kept_of(one, len(one)).rows
    assert kept_of(one * 0).digest != kept_of(-(one * 0)).digest


@pytest.mark.parametrize("shape", [(6, 4), (64, 64), (8, 4096), (40, 700)], ids=str)
def test_integers_that_change_signs_or_places_are_seen(shape):
    one = torch.randint(2, shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for other in (-one, one.flip(1), one.roll(1, 1)):
        assert kept_of(other).digest != kept_of(one).digest
        assert kept_of(other, len(one)).rows != kept_of(one, len(one)).rows


def test_rows_are_a_set():
    generator = torch.Generator().manual_seed(1)
    for width in (1, 3, 700, 5000):
        rows = torch.randn(12, width, generator=generator)
        whole = kept_of(rows, 12).rows
        assert kept_of(rows.flip(0), 12).rows == whole
        parts = [kept_of(part, len(part)).rows for part in rows.split((5, 4, 3))]
        assert sum(parts) % 2**64 == whole
        changed = rows.clone()
        changed[3, width // 2] += 1
        assert kept_of(changed, 12).rows != whole
        if width > 1:
            assert kept_of(rows.roll(1, 1), 12).rows != whole


def test_statistics_are_those_of_the_values():
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        for scale in (1e-20, 1.0, 1e20):
            tensor = scale * torch.randn(shape, generator=generator)
            values, kept = tensor.double(), kept_of(tensor)
            assert kept.squares == pytest.approx(float(values.square().sum()), rel=1e-5)
            assert kept.total == pytest.approx(float(values.sum()), abs=1e-5 * float(values.norm()))
            assert kept.largest == float(values.abs().max())


def test_infinity_and_nan_are_kept():
    tensor = torch.ones(50_000)
    tensor[7] = math.inf
    assert kept_of(tensor).largest in (math.inf, "inf")
    tensor[8] = math.nan
    assert kept_of(tensor).nans == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor.data.add_(1),
        lambda tensor: tensor.numpy().__iadd__(1),
        lambda tensor: setattr(tensor, "data", tensor.data.roll(1, 1)),
        lambda tensor: tensor.data.copy_(tensor.data.flip(0)),
    ],
    ids=["in place", "past autograd", "by numpy", "columns turned", "rows turned"],
)
def test_a_tensor_that_was_written_to_is_looked_at_again(write):
    recent, tensor = RecentlyKept(), torch.randn(30, 30)
    before = recent.kept_of(tensor)
    assert recent.kept_of(tensor) is before
    write(tensor)
    assert recent.kept_of(tensor)[0] == kept_of(tensor).digest != before[0]


def test_a_tensor_in_the_place_of_another_is_looked_at():
    recent = RecentlyKept()
    for number in range(50):
        tensor = torch.full((10,), float(number))
        assert recent.kept_of(tensor)[0] == kept_of(tensor).digest
    del tensor
    assert not recent._found


_SIZE = 1 << 30  # of a matrix of 4 EiB


def sparse(places, values):
    return torch.sparse_coo_tensor(places, values, (_SIZE, _SIZE), check_invariants=True)


def test_a_large_sparse_tensor_is_not_filled():
    places = torch.tensor([[0, 5, _SIZE - 1], [3, 2, 1]])
    values = torch.tensor([1.0, 2.0, 3.0])
    one, turned = sparse(places, values), sparse(places.flip(1), values.flip(0))
    moved = sparse(places.flip(0), values)
    assert kept_of(one).squares == 14.0
    assert kept_of(one).digest == kept_of(turned).digest
    assert kept_of(one).digest != kept_of(moved).digest
    assert kept_of(one).digest != kept_of(sparse(places, 2 * values)).digest


def test_texts_begin_alike_however_they_are_filled():
    texts = torch.randint(1, 9, (6, 10))
    whole = digest_of_starts([texts], 6)
    assert digest_of_starts([torch.nn.functional.pad(texts, (0, 5))], 6) == whole
    assert digest_of_starts([texts.flip(1)], 6) != whole
