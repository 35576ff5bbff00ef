"""Code that computes with the user's own module only after some steps is refused then."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from checked import X, Y
from evenstep.errors import ContractError
from grouping import grouped
from layouts import own
from trainers import sgd

LAYOUTS = {
    "one device": 1,
    "two devices": 2,
    "own memory": ["cpu:0", "cpu:1:own"],
    "own memories": own(2),
}


def name_of(value):
    return getattr(value, "__name__", str(value))


def layouts(*cases):
    """Parametrize `devices`, `max_in_flight` and more: each value once, not their product."""
    names = ("devices", "max_in_flight", "more")[: len(cases[0])]
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(LAYOUTS[layout], *rest, id=", ".join([layout, *map(name_of, rest)]))
            for layout, *rest in cases
        ],
    )


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.first = torch.nn.functional.relu

    def forward(self, x):
        return self.b(self.first(self.norm(self.a(x))))


class Warming:
    """An objective that computes with the user's own module once `after` batches were seen."""

    def __init__(self, outer, penalty):
        self.outer, self.penalty, self.is_warm = outer, penalty, False

    def __call__(self, model, x, y):
        total = F.cross_entropy(model(x), y, reduction="sum")
        if self.is_warm:
            total = total + self.penalty(self.outer, x)
        return total, len(y)


def of_a_parameter(outer, x):
    return len(x) * outer.b.weight.square().sum()


def of_an_output(outer, x):
    return outer(x).square().sum()


def of_the_last_examples(outer, x):
    return of_a_parameter(outer, x) if torch.equal(x[-1], X[-1]) else 0.0


@layouts(
    ("two devices", 1, of_a_parameter),
    ("own memory", 2, of_a_parameter),
    ("own memory", 1, of_an_output),
    ("own memories", 2, of_an_output),
    ("two devices", 2, of_the_last_examples),
    ("own memories", 1, of_the_last_examples),
)
def test_an_objective_that_reads_the_outer_model_later(devices, max_in_flight, more):
    model = Two()
    objective = Warming(model, more)
    options = {"devices": devices, "max_in_flight": max_in_flight}
    with evenstep.Trainer(model, sgd(model), **grouped(objective=objective, **options)) as trainer:
        trainer.on_shard = lambda shard, value: None  # which device computes a shard is fixed
        for _ in range(5):
            trainer.step(X, Y)
        before = trainer.fingerprint()
        objective.is_warm = True
        with pytest.raises(ContractError, match="must call the model that it is given"):
            trainer.step(X, Y).item()
        assert trainer.fingerprint() == before
        assert all(parameter.grad is None for parameter in model.parameters())


def test_one_device_refuses_it_when_the_contract_is_checked_again():
    model = Two()
    objective = Warming(model, of_a_parameter)
    with evenstep.Trainer(model, sgd(model), objective=objective, devices=1) as trainer:
        for _ in range(3):
            trainer.step(X, Y)
        objective.is_warm = True
        with pytest.raises(ContractError, match="must call the model that it is given"):
            trainer.step(X, Y)


@layouts(
    ("one device", 1, "first"),
    ("one device", 2, "every 100"),
    ("two devices", 2, "first"),
    ("own memory", 1, "every 100"),
    ("own memories", 2, "first"),
)
def test_a_forward_around_a_layer_of_the_model(devices, max_in_flight, more):
    model = Two()
    options = {"devices": devices, "max_in_flight": max_in_flight, "check": more}
    with evenstep.Trainer(model, sgd(model), F.cross_entropy, **grouped(**options)) as trainer:
        for _ in range(5):
            trainer.step(X, Y)
        before = trainer.fingerprint()
        original = model.b.forward
        model.b.forward = lambda x: original(x) * 0.5
        with pytest.raises(ContractError, match="the model itself"):
            trainer.step(X, Y).item()
        assert trainer.fingerprint() == before


@layouts(("two devices", 1), ("own memory", 2), ("own memories", 1))
def test_a_function_around_a_layer_that_writes_buffers(devices, max_in_flight):
    model = Two()
    options = {"devices": devices, "max_in_flight": max_in_flight}
    with evenstep.Trainer(model, sgd(model), F.cross_entropy, **grouped(**options)) as trainer:
        for _ in range(5):
            trainer.step(X, Y)
        before = trainer.fingerprint()
        norm = model.norm
        model.first = lambda x: norm(x).relu()
        with pytest.raises(ContractError, match=r"norm\.running_mean"):
            trainer.step(X, Y).item()
        assert trainer.fingerprint() == before


@layouts(("one device", 2), ("two devices", 1), ("own memory", 1), ("own memories", 2))
def test_functions_that_need_nothing_of_the_model_are_followed(devices, max_in_flight):
    def plain():
        model = Two()
        optimizer = sgd(model)
        for step in range(6):
            if step == 3:
                model.first = torch.tanh
            if step == 4:
                model.b.forward = lambda x: x[:, :4] + 0 * x.sum()
                model.first = lambda x: x.sin()
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    model = Two()
    options = {"devices": devices, "max_in_flight": max_in_flight, "shards": 1}
    with evenstep.Trainer(model, sgd(model), F.cross_entropy, **grouped(**options)) as trainer:
        for step in range(6):
            if step == 3:
                model.first = torch.tanh
            if step == 4:
                model.b.forward = lambda x: x[:, :4] + 0 * x.sum()
                model.first = lambda x: x.sin()
            trainer.step(X, Y)
    assert all(map(torch.equal, model.state_dict().values(), plain()))
