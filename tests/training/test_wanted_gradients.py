"""A batch that requires a gradient is refused: no gradient flows out of a step into its batch."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import BatchError
from grouping import grouped

X, Y = torch.randn(8, 6), torch.arange(8) % 3
ENCODER = nn.Linear(6, 6)
LAYOUTS = [
    {"devices": 1},
    {"devices": 2},
    {"devices": ["cpu:0", "cpu:1:own"], "max_in_flight": 2},
    {"devices": 1, "shards": 1},
]


def wanted():
    return X.clone().requires_grad_()


BATCHES = {
    "computed": (lambda: (ENCODER(X), Y), r"batch\[0\] was computed from parameters outside"),
    "leaf": (lambda: (wanted(), Y), r"batch\[0\] requires a gradient, but"),
    "target": (lambda: (X, ENCODER(X)), r"batch\[1\] was computed"),
    "nested": (lambda: ({"x": ENCODER(X)}, Y), r"batch\[0\]\['x'\] was computed"),
    "shared": (lambda: (evenstep.shared(ENCODER(X)), X, Y), r"batch\[0\] was computed"),
    "divided": (lambda: (evenstep.Shards([(X, Y), (ENCODER(X), Y)]),), r"batch\[0\] was computed"),
}


def objective(model, *batch):
    return model(X[:1]).sum(), 1


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_batch_that_requires_a_gradient_is_refused(name, call, options):
    build, words = BATCHES[name]
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        evenstep.Trainer(model, optimizer, **grouped(objective=objective, **options)) as trainer,
        pytest.raises(BatchError, match=words + r".*\.detach\(\)"),
    ):
        getattr(trainer, call)(*build())
    assert trainer.steps_done == 0


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_constant_and_an_evaluation_are_taken(options):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        trainer.step(ENCODER(X).detach(), Y)
        trainer.predict([wanted()])
        trainer.waitall()
        assert trainer.steps_done == 1
