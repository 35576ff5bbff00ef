"""Models that keep the contract of a step: none is refused, and the devices don't change a bit."""

import pytest
import torch

import evenstep
from good_models import HUGGING_FACE, MODELS
from layouts import own
from reference import assert_same_bits, whole_state

SIZES = (16, 19, 16)


def make(recipe):
    """Return the model and the batches of a recipe, always the same."""
    torch.manual_seed(0)
    return recipe.make_model(), [recipe.make_batch(size) for size in SIZES]


def train(recipe, devices):
    """Train a recipe's model for three steps; return its whole state by name, and the losses."""
    model, batches = make(recipe)
    optimizer = recipe.make_optimizer(model.parameters())
    with evenstep.Trainer(
        model,
        optimizer,
        recipe.loss,
        objective=recipe.objective,
        devices=devices,
        **recipe.options,
    ) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches]
    return whole_state(model, optimizer), losses


def assert_devices_do_not_matter(recipe):
    alone, alone_losses = train(recipe, 1)
    apart, apart_losses = train(recipe, own(2))
    assert_same_bits(apart, alone)
    assert apart_losses == alone_losses
    for name, parameter in make(recipe)[0].named_parameters():
        assert parameter.requires_grad or torch.equal(alone[f"parameter/{name}"], parameter)
    assert is_trained(recipe, alone)


def is_trained(recipe, state):
    untrained = make(recipe)[0].named_parameters()
    return any(not torch.equal(state[f"parameter/{name}"], value) for name, value in untrained)


@pytest.mark.parametrize("name", MODELS)
def test_the_devices_do_not_change_a_bit(name):
    assert_devices_do_not_matter(MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_devices_do_not_change_a_bit_of_hugging_face(name):
    pytest.importorskip("transformers")
    assert_devices_do_not_matter(HUGGING_FACE[name])
