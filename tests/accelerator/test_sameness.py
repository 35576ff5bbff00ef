"""Trainings on the emulated accelerator end with the bits of the CPU, on every set of devices."""

import pytest
import torch

import emu
import evenstep
from evenstep.errors import EvenstepError
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


RECURRENT = "the emulator has no fused cells, which torch uses on accelerators"
ON_THE_CPU = "the model makes tensors on the CPU, or calls numpy"
UNFIT = {
    **dict.fromkeys(
        (
            *("lstm", "gru", "recurrent cell", "packed sequences", "conditional random field"),
            *("seq2seq with attention", "ctc", "forecast", "gradients in shared memory, Lstm"),
        ),
        RECURRENT,
    ),
    **dict.fromkeys(
        (
            *("mixture of experts", "masked words", "flow matching", "gan, generator"),
            *("gradient penalty", "masked autoencoder", "mixup of given pairs", "quantiles"),
            *("fixed random features", "graph convolution"),
            "gradients in shared memory, Hooked",
        ),
        ON_THE_CPU,
    ),
    **dict.fromkeys(
        ("sparse embeddings", "word2vec", "gradients in shared memory, SparseSums"),
        "the emulator has no sparse tensors",
    ),
}
"""The models that the emulated accelerator can't train, and why."""

ROUNDED = {
    "two threads": "the emulator's kernels have one thread each",
    "bfloat16 weights": "torch's optimizers use other kernels on accelerators (foreach)",
}
"""The models to which plain torch gives other bits on an accelerator than on a CPU, and why."""


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
    return emu.on_the_host(whole_state(model, optimizer)), losses


def assert_bits_of_a_cpu(recipe, **layout):
    state, losses = train(recipe, devices="cpu:0")
    found, other_losses = train(recipe, **layout)
    assert_same_bits(found, state)
    assert other_losses == losses


@pytest.mark.parametrize("mode", emu.MODES)
@pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_every_layout_in_every_mode(mode, devices, in_flight):
    emu.configure(mode, seed=in_flight, delay_us=20)
    assert_bits_of_a_cpu(MODELS["mlp"], devices=devices, max_in_flight=in_flight)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {*UNFIT, *ROUNDED}])
@pytest.mark.thinned(2)
def test_every_model(name):
    assert_bits_of_a_cpu(MODELS[name], devices=["emu:0", "emu:1"])


@pytest.mark.parametrize("devices", [["emu:0", "emu:1"], ["emu:0", "emu:0"], ["emu:1"]])
@pytest.mark.parametrize("name", ROUNDED)
def test_models_that_torch_computes_otherwise_on_accelerators(name, devices):
    state, losses = train(MODELS[name], devices="emu:0")
    found, other_losses = train(MODELS[name], devices=devices)
    assert_same_bits(found, state)
    assert other_losses == losses


@pytest.mark.slow
@pytest.mark.parametrize("name", UNFIT)
def test_no_model_is_left_out_that_could_be_trained(name):
    with pytest.raises((NotImplementedError, RuntimeError, TypeError, EvenstepError)):
        train(MODELS[name], devices=["emu:0", "emu:1"])
