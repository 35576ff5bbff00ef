"""A count that depends on parameters: its gradient would be lost, so it is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import ModelError
from layouts import own
from trainers import open_trainer

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(16, 6, dtype=torch.float64, generator=GENERATOR)
Y = torch.randn(16, 1, dtype=torch.float64, generator=GENERATOR)


class Weighing(nn.Module):
    """Predicts a value, and how much an example counts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.value, self.weight = nn.Linear(6, 1).double(), nn.Linear(6, 1).double()

    def forward(self, x):
        return self.value(x), F.softplus(self.weight(x))


def sums(model, X, y):
    value, weight = model(X)
    return (weight * (value - y).square()).sum(), weight.sum()


def constant(model, X, y):
    total, count = sums(model, X, y)
    return total, count.detach()


def gathered(model, X, y):
    up, down = evenstep.all_gather(torch.stack(sums(model, X, y))[None]).sum(0)
    return up / down


def by_leaf(model, X, y):
    return sums(model, X, y)[0], model.value.bias


def of_guesses(model, X, y):
    value, weight = model(X)
    return (weight * (value - y).square()).sum(), (weight > 0).double().sum()


def train(objective, **options):
    """Return the gradients of one step by name."""
    model = Weighing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with open_trainer(model, optimizer=optimizer, objective=objective, **options) as trainer:
        trainer.step(X, Y)
    return {name: one.grad for name, one in model.named_parameters()}


def plain(objective):
    model = Weighing()
    total, count = objective(model, X, Y)
    (total / count).backward()
    return {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"shards": 1},
        {"shards": 4, "devices": own(2)},
        {"shards": 4, "separable": False},
        {"shards": 4, "check": "off", "devices": 1},
        {"shards": 4, "compile": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("objective", [sums, by_leaf])
def test_a_count_with_a_gradient_is_refused_with_what_to_write(objective, options):
    with pytest.raises(ModelError, match=r"count that requires a gradient.*count\.detach\(\)"):
        train(objective, **options)


@pytest.mark.parametrize("objective", [constant, of_guesses])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_count_without_a_gradient_is_a_constant(objective, shards):
    assert_close(train(objective, shards=shards), plain(objective))


def test_the_recipe_trains_the_ratio_of_the_whole_batch():
    found = train(gathered, shards=4, side_by_side=True)
    assert_close(found, plain(sums))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13)
