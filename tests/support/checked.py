"""A small network, and trainings of it in which the contract of a step is checked."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from grouping import grouped
from layouts import own
from trainers import sgd, state_of

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 4
CLASSES = 4


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES))


def summed(model, X, y):
    return F.cross_entropy(model(X), y, reduction="sum"), len(y)


def train(model, objective=summed, batches=((X, Y), (X, Y)), loss=None, **options):
    options = {"devices": 1, **options}
    with evenstep.Trainer(
        model, sgd(model), loss, **grouped(objective=None if loss else objective, **options)
    ) as trainer:
        for batch in batches:
            trainer.step(*batch)
        return state_of(trainer), trainer.contract


LAYOUTS = {"one device": 1, "two devices": 2, "own memory": own(2)}
everywhere = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)


class Momentum(nn.Module):
    """Updates a momentum encoder in forward."""

    def __init__(self, write):
        super().__init__()
        self.query, self.key = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES).requires_grad_(False)
        self.write = write

    def forward(self, x):
        self.write(self.key.weight, self.query.weight)
        return self.query(x) + self.key(x)


def write_in_place(key, query):
    with torch.no_grad():
        key.lerp_(query, 0.1)


def contrast(model, X, y):
    z = F.normalize(model(X))
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(X)), reduction="sum"), len(X)
