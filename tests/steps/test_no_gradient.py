"""A loss that no parameter of the model has got: plain torch refuses it, and so does a step."""

import pytest
import torch
import torch.nn.functional as F

import evenstep
from checked import X, Y, everywhere, net, summed
from evenstep.errors import ModelError
from trainers import sgd


def detached(model, X, y):
    return F.cross_entropy(model(X), y, reduction="sum").detach(), len(y)


def without_grad(model, X, y):
    with torch.no_grad():
        return summed(model, X, y)


@everywhere
@pytest.mark.parametrize("objective", [detached, without_grad])
@pytest.mark.parametrize("method", ["step", "backward"])
def test_a_loss_without_a_graph_is_refused(objective, method, devices):
    model = net()
    before = [one.clone() for one in model.parameters()]
    with evenstep.Trainer(model, sgd(model), objective=objective, devices=devices) as trainer:
        with pytest.raises(ModelError, match="no parameter of the model has got"):
            getattr(trainer, method)(X, Y)
        assert trainer.steps_done == 0
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_model_in_which_everything_is_frozen_is_refused(max_in_flight):
    model = net().requires_grad_(False)
    options = {"devices": 2, "max_in_flight": max_in_flight}
    with evenstep.Trainer(model, sgd(model), objective=summed, **options) as trainer:
        with pytest.raises(ModelError, match="requires_grad_"):
            trainer.step(X, Y).wait_to_read()
        model.requires_grad_(True)
        trainer.step(X, Y)
        trainer.waitall()
        assert trainer.steps_done == 1


def test_lbfgs_refuses_it_too():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with (
        evenstep.Trainer(model, optimizer, objective=detached, devices=1) as trainer,
        pytest.raises(ModelError, match="no parameter of the model has got"),
    ):
        trainer.step(X, Y)


def test_a_shard_without_a_graph_is_fine():
    def objective(model, X, y):
        total = F.cross_entropy(model(X), y, reduction="sum")
        return (total if 0 in y else total.detach()), len(y)

    model = net()
    with evenstep.Trainer(model, sgd(model), objective=objective, devices=2, shards=32) as trainer:
        trainer.step(X, Y)
        assert trainer.steps_done == 1
