"""A tensor with a graph that is set as an attribute between two steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from checked import X, Y
from evenstep.errors import ContractError
from trainers import LAYOUTS, sgd

layouts = pytest.mark.parametrize("devices", LAYOUTS, ids=str)
copies = pytest.mark.parametrize("devices", LAYOUTS[1:], ids=str)
flights = pytest.mark.parametrize("max_in_flight", [1, 2])


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.weight, self.seen = nn.Linear(6, 4), torch.ones(4), None

    def forward(self, x):
        self.seen = self.a(x)
        return self.seen * self.weight


def train(trainer, steps):
    for _ in range(steps):
        trainer.step(X, Y)
    trainer.waitall()


def trainer_of(model, devices, max_in_flight, **options):
    options = {"devices": devices, "max_in_flight": max_in_flight, **options}
    trainer = evenstep.Trainer(model, sgd(model), F.cross_entropy, **options)
    trainer.on_shard = lambda shard, value: None  # which device computes a shard is fixed
    return trainer


@copies
@flights
@pytest.mark.parametrize("value", [lambda one: one + 2, lambda one: one.square()])
def test_one_that_depends_on_a_parameter_is_refused(devices, max_in_flight, value):
    model = Weighted()
    with trainer_of(model, devices, max_in_flight) as trainer:
        train(trainer, 5)
        before = trainer.fingerprint()
        model.weight = value(model.a.bias)
        with pytest.raises(ContractError, match="must not have a graph"):
            trainer.step(X, Y).item()
        assert trainer.fingerprint() == before


@layouts
@flights
def test_one_that_was_there_before_the_trainer_is_refused(devices, max_in_flight):
    model = Weighted()
    model.weight = model.a.bias + 2
    with (
        trainer_of(model, devices, max_in_flight) as trainer,
        pytest.raises(ContractError, match="must not have a graph"),
    ):
        trainer.step(X, Y).item()


@layouts
@flights
def test_one_of_another_tensor_has_one_backward_pass(devices, max_in_flight):
    model, other = Weighted(), torch.ones(4, requires_grad=True)
    with trainer_of(model, devices, max_in_flight) as trainer:
        train(trainer, 5)
        model.weight = other.square()
        with pytest.raises(RuntimeError, match="graph a second time") as raised:
            trainer.step(X, Y).item()
        assert "compute it in forward" in "".join(raised.value.__notes__)


@layouts
@flights
def test_results_of_a_forward_pass_between_steps_are_none_of_a_step(devices, max_in_flight):
    model = Weighted()
    with trainer_of(model, devices, max_in_flight, shards=1) as trainer:
        for _ in range(6):
            trainer.step(X, Y)
            trainer.waitall()
            model(X)
    plain = Weighted()
    optimizer = sgd(plain)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(plain(X), Y).backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
