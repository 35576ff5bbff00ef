"""`evenstep.verify` finds each way to break the contract by its name, in a user's own trainer."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import ContractError
from layouts import own

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3


class Net(nn.Module):
    """Scores of three classes, from features to which `extra(module, x)` adds what it returns."""

    def __init__(self, extra=lambda module, x: 0.0):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.key = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(16, 3))
        self.hidden = 0.0
        self.extra = extra

    def forward(self, x):
        return self.layer(x) + self.extra(self, x)


def summed(model, X, y):
    return F.cross_entropy(model(X), y, reduction="sum"), len(y)


def follow_in_forward(module, x):
    module.key.weight.data.lerp_(module.layer.weight.data, 0.1)
    return module.key(x)


def fill_queue(module, x):
    module.queue[: len(x)] = module.layer(x).detach()
    return 0.0


def keep_hidden(module, x):
    before, module.hidden = module.hidden, module.layer(x).detach().mean()
    return before


HEAD, GENERATOR = nn.Linear(3, 3), torch.Generator()


def through_another(model, X, y):
    return F.cross_entropy(HEAD(model(X)), y, reduction="sum"), len(y)


def contrast(model, X, y):
    z = F.normalize(model(X))
    return F.cross_entropy(z @ z.T, torch.arange(len(X)), reduction="sum"), len(X)


CASES = {
    "a second module that learns": (Net(), through_another, "weight of a Linear outside the model"),
    "parameters written in forward": (Net(follow_in_forward), summed, r"key\.weight was written"),
    "a queue in a buffer": (Net(fill_queue), summed, "the buffer queue is written"),
    "state in an attribute": (Net(keep_hidden), summed, r"has changed model\.hidden"),
    "numpy.random": (
        Net(lambda module, x: float(np.random.rand())),
        summed,
        r"draws from numpy\.random",
    ),
    "a generator": (
        Net(lambda module, x: torch.rand(3, generator=GENERATOR)),
        summed,
        r"draws from a torch\.Generator",
    ),
    "a contrastive loss": (Net(), contrast, r"evenstep\.all_gather"),
    "a mean and one": (
        Net(),
        lambda m, X, y: (F.cross_entropy(m(X), y), 1),
        "sum over the examples",
    ),
    "forgotten weights": (
        Net(),
        lambda m, X, y: (
            F.cross_entropy(m(X), y, weight=torch.tensor([1.0, 5.0, 25.0])) * len(y),
            len(y),
        ),
        "class weights",
    ),
    "time first": (
        nn.RNN(6, 3),
        lambda m, X, y: (m(X[:, None])[0].square().sum(), len(X)),
        "batch_dim",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_breaks_the_contract_is_named(name):
    model, objective, line = CASES[name]
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def make_trainer(devices):
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return evenstep.Trainer(model, optimizer, objective=objective, devices=devices)

    with pytest.raises(ContractError, match=line):
        evenstep.verify(make_trainer, [(X, Y)] * 2, devices=[1, 2, own(2)], steps=2)


def test_a_training_that_keeps_it_is_identical():
    def make_trainer(devices):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return evenstep.Trainer(model, optimizer, objective=summed, devices=devices)

    assert evenstep.verify(make_trainer, [(X, Y)] * 2, devices=[1, 2, own(2)], steps=2).identical
