"""Trainers to test with, and what is compared of them."""

import torch
from torch import nn

import evenstep
from layouts import own
from reference import whole_state

LAYOUTS = [1, 2, 3, own(2), own(3)]


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def open_trainer(model, loss=None, **options):
    options = {"devices": 2, **options}
    return evenstep.Trainer(model, sgd(model), loss or nn.CrossEntropyLoss(), **options)


def state_of(trainer):
    return {name: torch.as_tensor(value).clone() for name, value in whole_state(
        trainer.model, trainer.optimizer).items()}  # fmt: skip
