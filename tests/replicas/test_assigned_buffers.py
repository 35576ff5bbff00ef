"""Tensors assigned to buffers by the user are what tensors written into them are, and as cheap."""

import functools

import pytest
import torch
from torch import nn

from evenstep.errors import ContractError
from layouts import own
from reference import assert_same_bits, plain_training, whole_state
from trainers import open_trainer, sgd
from zoo import CLASSES, make_batches

BATCHES = make_batches((16, 13, 16, 9, 16, 16))
LAYOUTS = [(1, 1), (2, 1), (own(2), 1), (1, 2), (2, 2), (own(2), 2)]


class Followed(nn.Module):
    """Has a running mean of its weights, and a count, both of which its output depends on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(36, 8), nn.Linear(8, CLASSES)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1)) + self.mean * self.count))


def followed(model):
    with torch.no_grad():
        return model.mean * 0.9 + model.body.weight.mean(1) * 0.1


def write(model):
    model.mean.copy_(followed(model))
    model.count += 1


def assign(model):
    model.mean = followed(model)
    model.count = model.count + 1


def register(model):
    model.register_buffer("mean", followed(model))
    model._buffers["count"] = model.count + 1


def plain(change):
    """Train without the library: one shard of the whole batch a step."""
    model = Followed()
    optimizer = sgd(model)
    plain_training(model, optimizer, BATCHES, after_update=change)
    return whole_state(model, optimizer)


def train(change, devices, in_flight, shards):
    model = Followed()
    with open_trainer(
        model, devices=devices, max_in_flight=in_flight, shards=shards, after_update=change
    ) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
        trainer.waitall()
        return whole_state(model, trainer.optimizer)


@functools.cache
def written(shards):
    return train(write, 1, 1, shards)


def test_a_hook_that_writes_does_what_a_plain_loop_does():
    expected = plain(write)
    for name, value in written(shards=1).items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected[name]))


@pytest.mark.parametrize(("devices", "in_flight"), LAYOUTS)
@pytest.mark.parametrize("change", [assign, register])
@pytest.mark.thinned(2)
def test_a_hook_that_assigns_does_what_one_that_writes_does(devices, in_flight, change):
    for shards in (1, 8):
        assert_same_bits(train(change, devices, in_flight, shards), written(shards))


@pytest.mark.parametrize(("devices", "in_flight"), LAYOUTS)
@pytest.mark.parametrize("by_hook", [True, False])
def test_nothing_is_made_again(devices, in_flight, by_hook):
    model = Followed()
    hook = assign if by_hook else None
    with open_trainer(
        model, devices=devices, max_in_flight=in_flight, after_update=hook
    ) as trainer:
        trainer.step(*BATCHES[0])
        trainer.waitall()
        replicas, structure = [*trainer._replicas.all], trainer._replicas.structure
        for X, y in BATCHES:
            if not by_hook:
                trainer.waitall()
                assign(model)
            trainer.step(X, y)
        trainer.waitall()
        now = trainer._replicas.all
        assert all(one is other for one, other in zip(now, replicas, strict=True))
        assert trainer._replicas.structure is structure


@pytest.mark.parametrize("devices", [1, 2, own(2)])
def test_a_tensor_that_was_assigned_stays_the_users(devices):
    """What is written into it later is seen by the next step, and by nothing else."""
    states = []
    for assigns in (False, True):
        model = Followed()
        with open_trainer(model, devices=devices) as trainer:
            mine = model.mean
            for X, y in BATCHES:
                if assigns:
                    mine = model.mean = mine.clone()
                mine += 0.25
                trainer.step(X, y)
            assert model.mean is mine
            states.append(whole_state(model, trainer.optimizer))
    assert_same_bits(*states)


@pytest.mark.parametrize("devices", [1, 2])
def test_other_assignments_are_followed_too(devices):
    """One tensor in two places, a view of a parameter's copy, another shape."""
    model = Followed()
    model.register_buffer("other", torch.zeros(8))
    with open_trainer(model, devices=devices) as trainer:
        trainer.step(*BATCHES[0])
        model.mean = model.other = torch.ones(8)
        trainer.step(*BATCHES[1])
        model.mean = torch.ones(1)
        trainer.step(*BATCHES[2])
        trainer.fingerprint()
    assert model.mean.shape == (1,)


def grow(model):
    model.mean = torch.zeros(1)


def test_a_hook_that_gives_a_buffer_another_shape_in_flight_is_refused():
    """The shards of the next step were submitted with the old one."""
    model = Followed()
    with open_trainer(model, max_in_flight=2, after_update=grow) as trainer:
        trainer.step(*BATCHES[0])
        with pytest.raises(ContractError, match=r"after_update has changed .*max_in_flight=1"):
            trainer.waitall()
