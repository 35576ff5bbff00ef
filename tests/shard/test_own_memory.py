"""Gradients that share memory: every layout equals a plain loop over the shards, by bits."""

import functools
import itertools

import pytest
import torch
from torch import nn

import evenstep
from grouping import grouped
from layouts import own, shared
from marks import slow
from reference import assert_same_bits, reference_training, whole_state
from shared_gradients import SHARING, build_sharing, stages_of_sharing
from zoo import make_batches

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SIZES = (16, 19, 8)  # the last one: shards of one example
LAYOUTS = {
    "1": {"devices": 1},
    "3": {"devices": shared(3)},
    "2 own": {"devices": own(2)},
    "2 in flight": {"devices": shared(2), "max_in_flight": 2},
    "2 stages": {"devices": shared(2), "divide": evenstep.Stages(None)},
    "owners": {"devices": own(2), "divide": evenstep.Owners()},
}


def optimizer_of(name):
    return functools.partial(torch.optim.SGD, lr=0.1) if name == "SparseSums" else SGD


@functools.cache
def reference_of(name, shards):
    return reference_training(
        build_sharing(name), optimizer_of(name), make_batches(SIZES), shards=shards
    )


def train(name, shards, **layout):
    if isinstance(layout.get("divide"), evenstep.Stages):
        layout = {**layout, "divide": evenstep.Stages(stages_of_sharing(name))}
    model = build_sharing(name)
    optimizer = optimizer_of(name)(model.parameters())
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), **grouped(seed=0, shards=shards, **layout)
    ) as trainer:
        losses = [trainer.step(X, y) for X, y in make_batches(SIZES)]
    return whole_state(model, optimizer), [*map(float, losses)]


QUICK = [*((layout, 8) for layout in LAYOUTS), ("1", 1), ("2 stages", 1)]
OTHERS = [case for case in itertools.product(LAYOUTS, (1, 2)) if case not in QUICK]


@pytest.mark.parametrize(("layout", "shards"), [*QUICK, *(slow(*case) for case in OTHERS)])
@pytest.mark.parametrize("name", SHARING)
@pytest.mark.thinned(3, 3)
def test_every_layout_equals_a_plain_loop_over_the_shards(name, layout, shards):
    if name == "SparseSums" and layout == "owners":
        return  # refused by name
    state, losses = train(name, shards, **LAYOUTS[layout])
    expected, expected_losses = reference_of(name, shards)
    assert_same_bits(state, expected)
    assert losses == expected_losses


def test_a_residual_stream_in_two_stages_is_no_race():
    """A stage's gradients are taken while the backward pass still reads what they share."""
    states = [train("ResidualBias", 8, **LAYOUTS["2 stages"])[0] for _ in range(5)]
    for state in states:
        assert_same_bits(state, reference_of("ResidualBias", 8)[0])


def test_gradients_of_the_users_parameters_share_no_memory():
    model = build_sharing("Positions")
    optimizer = SGD(model.parameters())
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=1, shards=1) as trainer:
        trainer.backward(*make_batches([8])[0])
    memories = {one.grad.untyped_storage().data_ptr() for one in model.parameters()}
    assert len(memories) == len([*model.parameters()])
