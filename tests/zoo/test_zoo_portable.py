"""The same models in portable arithmetic: right, the same on all devices, or refused by name."""

import pytest
import torch

from evenstep.errors import InputError
from evenstep.shard.together import Together
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

ONE_BY_ONE = {
    "packed sequences": "results of different shapes",
    "conditional random field": "results of different shapes",
    "seq2seq with attention": "a number that differs from shard to shard",
    "gan, generator": "a tensor's place in its storage",
    "gan, discriminator": "a tensor's place in its storage",
    "shards without labels": "differ",
    "spectral norm": "a tensor's place in its storage",
    "spectral norm by a hook": "a tensor's place in its storage",
    "checkpointed activations": "the state of random numbers",
    "checkpointed reentrantly": None,
    "bfloat16 weights": "a gradient of torch.bfloat16",
    "one shard": None,
    "synchronised batch norm": None,
    "gradients in shared memory, Hooked": "numpy()",
}
"""Why shards can't be computed at once, by model; None where that is not even tried."""


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
@pytest.mark.thinned(6, 3)
def test_the_devices_do_not_change_a_bit(name):
    state, losses = train(MODELS[name], devices=1, arithmetic="portable")
    other_state, other_losses = train(MODELS[name], **SEVERAL, arithmetic="portable")
    assert_same_bits(other_state, state)
    assert other_losses == losses


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
@pytest.mark.thinned(6, 3)
def test_shards_are_computed_at_once_where_that_gives_their_bits(name, monkeypatch):
    made, make = [], Together.__init__

    def noted(together):
        make(together)
        made.append(together)

    monkeypatch.setattr(Together, "__init__", noted)
    train(MODELS[name], devices=1, arithmetic="portable")
    refused = [one.refused for one in made if one.refused]
    shown = [one for one in made if one._shown]
    if name not in ONE_BY_ONE:
        assert shown
        assert not refused
    elif ONE_BY_ONE[name] is None:
        assert not shown
        assert not refused
    else:
        (why,) = refused
        assert ONE_BY_ONE[name] in why


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {*REFUSED, *NOT_WHOLE}])
@pytest.mark.thinned(6, 3)
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
