"""Trainers to test with, and what is compared of them."""

import torch
from torch import nn

import evenstep
from grouping import grouped
from layouts import DelayedLanes, delayed, own
from reference import whole_state
from zoo import options_of

LAYOUTS = [1, 2, 3, own(2), own(3)]


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(model, make_optimizer, batches, **options):
    """Train `model` with lanes and shards that are late; return (its state by name, the losses)."""
    optimizer = make_optimizer(delayed(model).parameters())
    options = {"lanes": DelayedLanes, **options_of(model), **options}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = [float(loss) for loss in [trainer.step(X, y) for X, y in batches]]
    return whole_state(model, optimizer), losses


def open_trainer(model, loss=None, optimizer=None, **options):
    """Return a trainer with SGD, cross entropy and two devices, where nothing else is given."""
    options = {"devices": 2, **options}
    if loss is None and "objective" not in options:
        loss = nn.CrossEntropyLoss()
    optimizer = sgd(model) if optimizer is None else optimizer
    return evenstep.Trainer(model, optimizer, loss, **grouped(**options))


def take_steps(trainer, batches):
    """Open a trainer, and take a step on each batch; return the state."""
    with trainer:
        for batch in batches:
            trainer.step(*batch)
        trainer.waitall()
        return state_of(trainer)


def state_of(trainer):
    """Return copies of a trainer's whole state, by name."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in whole_state(trainer.model, trainer.optimizer).items()
    }
