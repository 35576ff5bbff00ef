"""The same models in portable arithmetic: right, the same on all devices, or refused by name."""

import pytest
import torch

from evenstep.errors import InputError
from good_models import MODELS
from reference import assert_same_bits
from test_plain import (
    NOT_WHOLE,
    ROUNDING,
    draws_numbers,
    error_of,
    has_batch_statistics,
    mean_gradient,
    whole_gradient,
)
from test_zoo import SEVERAL, train

REFUSED = {
    "mixture of experts": "polar",
    "sparse embeddings": "sparse_coo_tensor",
    "word2vec": "sparse_coo_tensor",
    "ctc": "ctc_loss",
    "mixup of given pairs": "dirichlet",
    "margins": "multi_margin_loss",
    "orthogonal weight": "householder_product",
    "complex weights": "fft",
    "float64": "of float64",
    "autocast": "precision='bf16'",
    "noisy layers": "rrelu",
    "gradients in shared memory, Normed": "matrix_exp",
    "gradients in shared memory, ComplexFilter": "fft",
    "gradients in shared memory, SparseSums": "sparse_coo_tensor",
}
"""What has no portable kernel, by model."""


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
@pytest.mark.thinned(6)
def test_the_devices_do_not_change_a_bit(name):
    state, losses = train(MODELS[name], devices=1, arithmetic="portable")
    other_state, other_losses = train(MODELS[name], **SEVERAL, arithmetic="portable")
    assert_same_bits(other_state, state)
    assert other_losses == losses


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {*REFUSED, *NOT_WHOLE}])
@pytest.mark.thinned(6)
def test_the_mean_gradient_is_that_of_plain_torch_in_float64(name):
    recipe = MODELS[name]
    if not (has_batch_statistics(recipe) or draws_numbers(recipe)):
        found = mean_gradient(recipe, 3, arithmetic="portable")
        assert error_of(found, whole_gradient(recipe, torch.float64)) < ROUNDING


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.thinned(3)
def test_what_has_no_kernel_is_named(name):
    with pytest.raises(InputError, match=REFUSED[name]):
        train(MODELS[name], devices=1, arithmetic="portable")
