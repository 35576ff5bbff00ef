"""The digits: the known sizes, the fixed split, and exact enlargement."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from torch.nn import functional as F

from evenstep.data import digits
from evenstep.data.digits import bilinear_weights, enlarge

SHADES = st_numpy.arrays(np.int64, (2, 8, 8), elements=st.integers(0, 16))


@pytest.mark.parametrize(("train", "examples"), [(True, 1438), (False, 359)])
def test_shapes_types_and_ranges(train, examples):
    images, labels = digits(train).tensors
    assert images.shape == (examples, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert images.min() >= 0
    assert images.max() <= 1
    assert labels.shape == (examples,)
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == list(range(10))


def test_every_fifth_example_is_for_the_test():
    source = pytest.importorskip("sklearn.datasets").load_digits()
    for train in (True, False):
        chosen = [i for i in range(1797) if (i % 5 != 4) == train]
        images, labels = digits(train).tensors
        small = torch.from_numpy(source.images[chosen] / 16).unsqueeze(1)
        assert labels.tolist() == source.target[chosen].tolist()
        torch.testing.assert_close(
            images.double(), F.interpolate(small, size=28, mode="bilinear"), rtol=0, atol=1e-7
        )


@given(SHADES)
def test_enlargement_rounds_torch_s_exact_one_once(images):
    exact = F.interpolate(torch.from_numpy(images / 16).unsqueeze(1), size=28, mode="bilinear")
    error = np.abs(enlarge(images) - exact.squeeze(1).numpy())
    assert error.max() <= 2**-25 + 1e-15  # half a unit in the last place below 1


@given(st.integers(0, 16))
def test_an_even_image_stays_even(shade):
    images = np.full((1, 8, 8), shade)
    assert np.array_equal(enlarge(images), np.full((1, 28, 28), shade / 16, dtype=np.float32))


def test_the_weights_of_a_pixel_add_up():
    assert bilinear_weights().sum(axis=1).tolist() == [28] * 28
