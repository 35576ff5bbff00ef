"""Trainings on the emulated accelerator end with the bits of the CPU, on every set of devices."""

import pytest
import torch

import emu
import evenstep
from good_models import MODELS
from grouping import grouped
from reference import assert_same_bits, whole_state

SIZES = (16, 19, 16)

LAYOUTS = {
    "1": ["emu:0"],
    "2": ["emu:0", "emu:1"],
    "twice": ["emu:0", "emu:0"],
    "4": ["emu:3", "emu:0", "emu:2", "emu:1"],
    "with a CPU": ["emu:0", "cpu:0"],
    "behind a CPU": ["cpu:0", "emu:1"],
    "behind a CPU of its own": ["cpu:0", "cpu:1:own", "emu:1"],
}


def train(recipe, **layout):
    """Train a recipe's model for three steps; return its whole state by name, and the losses."""
    torch.manual_seed(0)
    model = recipe.make_model()
    optimizer = recipe.make_optimizer(model.parameters())
    with evenstep.Trainer(
        model,
        optimizer,
        recipe.loss,
        **grouped(objective=recipe.objective, **layout, **recipe.options),
    ) as trainer:
        losses = [trainer.step(*recipe.make_batch(size)) for size in SIZES]
        losses = [*map(float, losses)]
    state = {name: value.cpu() for name, value in whole_state(model, optimizer).items()}
    return state, losses


def assert_bits_of_a_cpu(recipe, **layout):
    state, losses = train(recipe, devices=1)
    found, other_losses = train(recipe, **layout)
    assert_same_bits(found, state)
    assert other_losses == losses


@pytest.mark.parametrize("mode", emu.MODES)
@pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_every_layout_in_every_mode(mode, devices, in_flight):
    emu.configure(mode, seed=in_flight, delay_us=20)
    assert_bits_of_a_cpu(MODELS["mlp"], devices=devices, max_in_flight=in_flight)


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name):
    assert_bits_of_a_cpu(MODELS[name], devices=["emu:0", "emu:1"])
