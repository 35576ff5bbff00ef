"""Models that keep the contract of a step: none is refused, and the devices don't change a bit."""

import pytest
import torch

import evenstep
from good_models import HUGGING_FACE, MODELS
from grouping import grouped
from reference import assert_same_bits, whole_state

SIZES = (16, 19, 16)
SEVERAL = {"devices": ["cpu:0", "cpu:1:own"], "max_in_flight": 2}
"""One device with the model's own parameters, one with copies of them, and steps in flight."""


def make_model(recipe):
    torch.manual_seed(0)
    return recipe.make_model()


def train(recipe, **layout):
    """Train a recipe's model for three steps; return its whole state by name, and the losses."""
    model = make_model(recipe)
    optimizer = recipe.make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    with evenstep.Trainer(
        model,
        optimizer,
        recipe.loss,
        **grouped(objective=recipe.objective, scheduler=scheduler, **layout, **recipe.options),
    ) as trainer:
        for size in SIZES:
            losses.append(trainer.step(*recipe.make_batch(size)))
            scheduler.step()
        assert_judged(recipe, trainer.contract)
    return whole_state(model, optimizer), list(map(float, losses))


def assert_judged(recipe, report):
    """The self-check was made, and could tell whether the loss adds up, or said why not."""
    assert recipe.unjudged in report.unjudged
    assert bool(report.unjudged) == bool(recipe.unjudged), report.unjudged


def assert_devices_do_not_matter(recipe):
    state, losses = train(recipe, devices=1)
    other_state, other_losses = train(recipe, **SEVERAL)
    assert_same_bits(other_state, state)
    assert other_losses == losses
    assert_trained(make_model(recipe), state)


def assert_trained(untrained, state):
    """Parameters that require a gradient have moved (one at least), and no others."""
    moved = {
        name: not torch.equal(state[f"parameter/{name}"], parameter)
        for name, parameter in untrained.named_parameters()
    }
    assert any(moved.values())
    assert not any(moved[n] for n, p in untrained.named_parameters() if not p.requires_grad)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (number % 3 > 0))  # 40 are fast
        for number, name in enumerate(MODELS)
    ],
)
@pytest.mark.thinned(2)
def test_the_devices_do_not_change_a_bit(name):
    assert_devices_do_not_matter(MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_devices_do_not_change_a_bit_of_hugging_face(name):
    assert_devices_do_not_matter(HUGGING_FACE[name])
