"""Functions in attributes and hooks that refer to the model are not copied with it: refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from checked import X, Y, net
from evenstep.errors import ContractError
from layouts import own
from trainers import sgd


class Lambda(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(6, affine=False), net()
        self.first = lambda x: self.norm(x)

    def forward(self, x):
        return self.net(self.first(x))


def hooked():
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False), net())
    model[1].register_forward_pre_hook(lambda module, inputs: (model[0](inputs[0]),))
    return model


class Method(Lambda):
    def __init__(self):
        super().__init__()
        self.first = self.normed

    def normed(self, x):
        return self.norm(x)


@pytest.mark.parametrize(
    ("model", "options", "devices"),  # each value with each other one
    [
        *((Lambda, {}, 2), (hooked, {"max_in_flight": 2}, 2)),
        *((hooked, {}, own(2)), (Lambda, {"max_in_flight": 2}, own(2))),
    ],
)
def test_a_function_that_writes_buffers_of_the_model_itself_is_refused(model, options, devices):
    model = model()
    before = [one.clone() for one in model.buffers()]
    options = {"devices": devices, **options}
    with (
        evenstep.Trainer(model, sgd(model), F.cross_entropy, **options) as trainer,
        pytest.raises(ContractError, match=r"norm|0\.running_mean"),
    ):
        trainer.step(X, Y)
    assert all(map(torch.equal, before, model.buffers()))


def test_a_bound_method_in_an_attribute_is_fine():
    prints = set()
    for devices in (1, 2, own(2)):
        model = Method()
        with evenstep.Trainer(model, sgd(model), F.cross_entropy, devices=devices) as trainer:
            trainer.step(X, Y)
            trainer.step(X, Y)
            prints.add(trainer.fingerprint())
    assert len(prints) == 1


class Agent:
    """An object with the model in it, whose loss computes with that one."""

    def __init__(self, policy):
        self.policy = policy

    def loss(self, model, x, y):
        return F.cross_entropy(self.policy(x), y)

    def penalty(self, model, x, y):
        decay = sum(one.square().sum() for one in self.policy.parameters())
        return F.cross_entropy(model(x), y) + 0.1 * decay

    def distilled(self, model, x, y):
        with torch.no_grad():
            before = self.policy(x).softmax(1)
        return F.cross_entropy(model(x), before)


@pytest.mark.parametrize(
    ("devices", "shards", "objective"),
    [
        *((1, 1, "loss"), (own(1), 4, "loss"), (2, 4, "loss")),
        *((1, 4, "penalty"), (own(1), 1, "penalty"), (2, 1, "penalty")),
    ],
)
def test_an_objective_that_computes_with_the_outer_model_is_refused(devices, shards, objective):
    model = net()
    agent = Agent(model)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(
        model, sgd(model), objective=getattr(agent, objective), **options
    ) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(ContractError, match=r"objective\(model, \*batch\) must call the model"):
            trainer.step(X, Y)
        assert trainer.fingerprint() == before
        with pytest.raises(ContractError, match="must call the model"):
            trainer.backward(X, Y)


def test_reading_the_outer_model_without_a_gradient_is_fine():
    prints = set()
    for devices in (1, 2):
        model = net()
        objective = Agent(model).distilled
        with evenstep.Trainer(model, sgd(model), objective=objective, devices=devices) as trainer:
            trainer.step(X, Y)
            prints.add(trainer.fingerprint())
    assert len(prints) == 1


def clears_before(model, optimizer, outer, x, y):
    optimizer.zero_grad()
    return F.cross_entropy(model(x), y)


def clears_after(model, optimizer, outer, x, y):
    loss = F.cross_entropy(model(x), y)
    outer.zero_grad()
    return loss


def fills(model, optimizer, outer, x, y):
    optimizer.zero_grad(set_to_none=False)
    return F.cross_entropy(model(x), y)


def clears_its_own(model, optimizer, outer, x, y):
    model.zero_grad()
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("objective", [clears_before, clears_after, fills])
def test_an_objective_that_clears_the_gradients_of_the_model_is_refused(objective, devices):
    """Another device may be computing them: torch crashed, or ended with a segmentation fault."""
    model = net()
    optimizer = sgd(model)

    def training_step(copied, x, y):
        return objective(copied, optimizer, model, x, y)

    with evenstep.Trainer(model, optimizer, objective=training_step, devices=devices) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(ContractError, match=r"leave out optimizer\.zero_grad\(\)"):
            trainer.step(X, Y)
        assert trainer.fingerprint() == before
        assert all(one.grad is None for one in model.parameters())


def test_gradients_of_the_users_own_and_of_the_copy_may_be_there():
    prints = set()
    for devices in (1, 2):
        model = net()
        optimizer = sgd(model)

        def training_step(copied, x, y, given=(optimizer, model)):
            return clears_its_own(copied, *given, x, y)

        with evenstep.Trainer(
            model, optimizer, objective=training_step, devices=devices
        ) as trainer:
            sum(one.square().sum() for one in model.parameters()).backward()
            trainer.step(X, Y)
            prints.add(trainer.fingerprint())
    assert len(prints) == 1
