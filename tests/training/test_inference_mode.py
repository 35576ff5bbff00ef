"""`torch.inference_mode` around calls of a trainer changes nothing, in any layout."""

import contextlib
import functools
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from grouping import grouped
from reference import assert_same_bits, whole_state

X, Y = torch.randn(32, 6), torch.randint(0, 4, (32,))
LAYOUTS = [
    {"devices": 1},
    {"devices": 2},
    {"devices": ["cpu:0", "cpu:1:own"]},
    {"devices": ["cpu:0", "cpu:1:own"], "max_in_flight": 2},
    {"devices": 2, "side_by_side": True},
    {"devices": 2, "divide": evenstep.Owners()},
    {"devices": 2, "divide": evenstep.Stages({"0": 0, "2": 1})},
]


def built():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def opened(**layout):
    model, optimizer = built()
    return evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**layout))


def steps(mode, folder, **layout):
    with opened(**layout) as trainer:
        with mode():
            trainer.step(X, Y)
            trainer.step(X, Y)
        trainer.step(X, Y)
    return trainer


def batches(mode, folder, **layout):
    with opened(**layout) as trainer, mode():
        for batch in trainer.epoch(DataLoader(TensorDataset(X, Y), batch_size=16)):
            trainer.step(*batch)
            trainer.evaluate([batch], {"accuracy": evenstep.metrics.accuracy})
            trainer.predict([X])
    return trainer


def construction(mode, folder, **layout):
    model, optimizer = built()
    with mode():
        trainer = evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**layout))
    with trainer:
        trainer.step(X, Y)
        trainer.step(X, Y)
    return trainer


def changed_model(mode, folder, **layout):
    with opened(**layout) as trainer:
        trainer.step(X, Y)
        trainer.waitall()
        trainer.model.register_forward_hook(lambda module, given, output: output * 2)
        trainer.model.scale = torch.ones(3)
        with mode():
            trainer.step(X, Y)
        trainer.step(X, Y)
    return trainer


def resumed(mode, folder, **layout):
    with opened(**layout) as trainer:
        trainer.step(X, Y)
        with mode():
            trainer.save(folder)
    model, optimizer = built()
    with mode():
        trainer = evenstep.Trainer.load(
            folder, model, optimizer, nn.CrossEntropyLoss(), **grouped(**layout)
        )
    with trainer:
        trainer.step(X, Y)
    return trainer


def gradients(mode, folder, **layout):
    with opened(**layout) as trainer:
        for _ in range(2):
            with mode():
                trainer.backward(X, Y)
            trainer.optimizer.step()
    return trainer


FUNCTIONS = [steps, batches, construction, changed_model, resumed, gradients]


@functools.cache
def without(train):
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(contextlib.nullcontext, folder, devices=1)
    return whole_state(trainer.model, trainer.optimizer)


@pytest.mark.parametrize(
    ("train", "layout"),
    [
        (train, layout)
        for number, layout in enumerate(LAYOUTS)
        for train in (FUNCTIONS[number % 6], FUNCTIONS[(number + 2) % 6], FUNCTIONS[-1])
        if train is not gradients or "divide" not in layout  # owners of state take whole steps
    ],
)
@pytest.mark.thinned(2)
def test_the_mode_changes_nothing(train, layout, tmp_path):
    """Each function on two or three layouts; a backward pass on all of them."""
    around = train(torch.inference_mode, tmp_path, **layout)
    assert_same_bits(whole_state(around.model, around.optimizer), without(train))
