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


@pytest.mark.parametrize("model", [Lambda, hooked])
@pytest.mark.parametrize("options", [{}, {"max_in_flight": 2}])
@pytest.mark.parametrize("devices", [2, own(2)])
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
