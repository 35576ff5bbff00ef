"""Random trainings on random sets of devices, against the plain reference of `reference.py`."""

import contextlib
import functools
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

import emu
import evenstep
from grouping import grouped
from reference import assert_same_bits, reference_training, whole_state
from zoo import build, make_batches, options_of

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MODELS = (
    "attention",
    "batch_norm",
    "branching",
    "convolution",
    "dropout",
    "noisy",
    "tied",
    "unused",
)
ACCELERATORS = [f"emu:{number}" for number in range(emu.DEVICES)]
CPUS = ["cpu:0", "cpu:1", "cpu:2:own"]
SEEDS, QUICK, SLOW = 2_000, 56, 300


@functools.cache
def reference_of(name, sizes, shards, make_optimizer):
    return reference_training(build(name), make_optimizer, make_batches(sizes), shards=shards)


def drawn(seed):
    """Return a random experiment, and a random layout with at least one accelerator."""
    draw = random.Random(seed)
    name = draw.choice(MODELS)
    shards = draw.randint(1, 9)
    sizes = (shards * draw.randint(2, 4), shards * 2 + draw.randint(0, 3), shards * 2)
    if name != "batch_norm":
        sizes = (sizes[0], draw.randint(1, shards + 2), sizes[2])
    experiment = name, sizes, shards, draw.choice((MOMENTUM, ADAM))
    devices = draw.choices(ACCELERATORS, k=draw.randint(1, 3))
    devices += draw.sample(CPUS, draw.choice((0, 0, 1, 2)))
    draw.shuffle(devices)
    layout = {"devices": devices, "max_in_flight": draw.randint(1, 3)}
    return experiment, layout, draw.choice(emu.MODES), draw.choice((1, 20, 200))


def seeds():
    for seed in range(SEEDS):
        marks = [pytest.mark.slow] * (seed >= QUICK) + [pytest.mark.exhaustive] * (seed >= SLOW)
        yield pytest.param(seed, marks=marks)


@pytest.mark.parametrize("seed", [*seeds()])
def test_a_random_layout_has_the_bits_of_the_reference(seed):
    experiment, layout, mode, delay_us = drawn(seed)
    assert_reference(experiment, layout, mode, seed, delay_us)


def assert_reference(experiment, layout, mode, seed, delay_us):
    """Train in a layout, with kernels in the given order; the bits must be the reference's."""
    name, sizes, shards, make_optimizer = experiment
    expected, expected_losses = reference_of(name, sizes, shards, make_optimizer)
    emu.configure(mode, seed, delay_us)
    model = build(name)
    optimizer = make_optimizer(model.parameters())
    options = {**options_of(model), **layout}
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), **grouped(shards=shards, **options)
    ) as trainer:
        losses = [float(loss) for loss in [trainer.step(*b) for b in make_batches(sizes)]]
    assert_same_bits(emu.on_the_host(whole_state(model, optimizer)), expected)
    assert losses == expected_losses


@pytest.fixture
def _load():
    """Busy processes on every core while a test runs."""
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as busy:
        for _ in range(os.cpu_count() or 1):
            busy.callback(busy.enter_context(subprocess.Popen(command)).kill)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_load")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("delay_us", [1_000, 5_000])
def test_delays_of_milliseconds_under_load_move_no_bit(delay_us, seed):
    experiment, layout, *_ = drawn(seed)
    assert_reference(experiment, layout, "thread", seed, delay_us)
