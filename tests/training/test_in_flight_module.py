"""What the user does to the module while steps are in flight holds from the next step on."""

import pytest
import torch
from torch import nn

from changing import CHANGES, Changing
from in_flight import DEVICES, assert_same_on, train
from layouts import own
from reference import assert_same_bits


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.2)
        self.temperature = 1.0
        self.mask = torch.ones(36)

    def forward(self, x):
        x = self.norm(self.body(x.flatten(1) * self.mask))
        return self.head(self.dropout(x)) * self.temperature


def change_at(wanted, change):
    def act(trainer, number, loss):
        if number == wanted:
            change(trainer.model)

    return act


def halve(module, inputs, output):
    return output * 0.5


OF_PARTS = {
    "dropout's rate": lambda model: setattr(model.dropout, "p", 0.5),
    "a norm evaluates": lambda model: model.norm.eval(),
    "the mode": lambda model: model.eval(),
    "frozen": lambda model: model.body.requires_grad_(False),
    "a layer": lambda model: setattr(model, "dropout", nn.Sequential(nn.Tanh(), nn.Dropout(0.3))),
    "a hook": lambda model: model.body.register_forward_hook(halve),
    "a gradient's hook": lambda model: model.head.weight.register_hook(lambda one: one * 0.5),
    "an attribute": lambda model: setattr(model, "temperature", 2.0),
    "a tensor": lambda model: model.mask[3:9].zero_(),
}


@pytest.mark.parametrize("change", OF_PARTS.values(), ids=OF_PARTS)
@pytest.mark.thinned(2)
def test_a_change_of_the_module_holds_from_the_next_step_on(change):
    later = assert_same_on(DEVICES, change_at(2, change), model=Parts, waits=True)
    for devices in (3, own(2)):
        alone = train(devices, change_at(2, change), model=Parts, max_in_flight=1)
        assert_same_bits(alone[0], later[0])
        assert alone[1:] == later[1:]
    earlier = train(1, change_at(1, change), model=Parts, max_in_flight=1)
    assert earlier[1][:2] == later[1][:2]
    assert earlier[1] != later[1]


@pytest.fixture(scope="module")
def unchanged():
    return train(1, lambda *step: None, model=Changing, max_in_flight=1)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.thinned(2)
def test_every_change_that_forward_can_read_holds_from_the_next_step_on(change, unchanged):
    act = change_at(2, change)
    changed = assert_same_on(DEVICES, act, model=Changing, waits=True)
    assert changed[1] != unchanged[1]


def test_switching_a_part_there_and_back_between_steps():
    def act(trainer, number, loss):
        trainer.model.norm.train(number % 2 == 0)
        trainer.model.dropout.p = 0.1 * number

    assert_same_on(DEVICES, act, model=Parts, waits=True)


def test_after_waitall_and_after_a_loss_was_read_the_parameters_may_be_written():
    def act(trainer, number, loss):
        if number == 2:
            trainer.waitall()
        if number >= 2:
            float(loss)
            with torch.no_grad():
                trainer.model.head.weight.mul_(0.5)
                trainer.model.norm.running_mean.zero_()
        if number == 4:
            trainer.model.head.weight.data = trainer.model.head.weight.data * 0.5

    assert_same_on(DEVICES, act, model=Parts, waits="before")
