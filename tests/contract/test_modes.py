"""Modes of torch around a step, which reach only the thread that calls it, are refused by name."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from evenstep.errors import ContractError
from trainers import open_trainer

X, Y = torch.randn(16, 6), torch.arange(16) % 4


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def saved_tensors():
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


MODES = {
    "Function": Function,
    "Dispatch": Dispatch,
    "saved_tensors_hooks": saved_tensors,
    "DeviceContext": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_a_step_is_refused_by_its_name(name):
    with open_trainer(nn.Linear(6, 4), devices=2) as trainer:
        with pytest.raises(ContractError, match=name), MODES[name]():
            trainer.step(X, Y)
        trainer.step(X, Y)
        assert trainer.steps_done == 1


def test_the_default_device_may_be_the_trainers():
    with open_trainer(nn.Linear(6, 4), devices=2) as trainer, torch.device("cpu"):
        trainer.step(X, Y)


@pytest.mark.parametrize("make", [Function, saved_tensors], ids=["mode", "hooks"])
def test_a_mode_inside_the_objective_is_fine(make):
    def objective(model, X, y):
        with make():
            return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(model, optimizer, objective=objective, devices=2) as trainer:
        trainer.step(X, Y)
