"""Random numbers of the model, the data and the user keep out of each other's way in flight."""

import functools

import pytest
import torch
from torch import nn

from evenstep.data import Loader
from in_flight import DEVICES, assert_same_on, numbered, outcome
from layouts import own
from reference import assert_same_bits
from trainers import open_trainer
from zoo import build

on_devices = pytest.mark.parametrize("devices", DEVICES, ids=str)


class Switched(nn.Module):
    """Dropout that is off at first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(36, 16), nn.Linear(16, 5)
        self.dropout = nn.Dropout(0.5).eval()
        self.rate = 0.0
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.late = False

    def forward(self, x):
        x = self.dropout(self.body(x.flatten(1)))
        self.calls += 1
        rate = 0.5 if self.late and self.calls > 3 else self.rate
        return self.head(nn.functional.dropout(x, rate) if rate else x)


class Late(Switched):
    """Dropout that switches itself on."""

    def __init__(self):
        super().__init__()
        self.late = True


SWITCHES = {
    "mode": lambda model: model.dropout.train(),
    "rate": lambda model: setattr(model, "rate", 0.5),
    "layer": lambda model: setattr(model, "dropout", nn.Dropout(0.5)),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_dropout_that_is_switched_on_for_the_third_step(switch):
    """The user's own draws, too, are those of a program without evenstep."""
    drawn = {}

    def act(trainer, number, loss):
        if number == 0:
            torch.manual_seed(4)
        if number == 1:
            switch(trainer.model)
        if number >= 2:
            drawn.setdefault(trainer, []).extend(draw())

    assert_same_on(DEVICES, act, model=Switched, waits=True)
    torch.manual_seed(4)
    plain = [value for _ in range(4) for value in draw()]
    assert [*drawn.values()] == [plain] * (1 + len(DEVICES))


def test_dropout_that_switches_itself_on():
    def act(trainer, number, loss):
        draw()

    assert_same_on(DEVICES, act, model=Late)


@pytest.mark.parametrize("name", ["batch_norm", "dropout", "noisy", "recurrent", "attention"])
def test_the_users_own_draws_are_those_of_a_program_without_evenstep(name):
    drawn = {}

    def act(trainer, number, loss):
        if number == 0:
            torch.manual_seed(4)
        drawn.setdefault(trainer, []).extend(draw())

    assert_same_on(DEVICES, act, model=name)
    torch.manual_seed(4)
    plain = [value for _ in range(6) for value in draw()]
    assert [*drawn.values()] == [plain] * (1 + len(DEVICES))


def draw():
    return [*torch.randn(3).tolist(), *torch.randperm(5).tolist()]


class Augmented(torch.utils.data.Dataset):
    """Examples with noise, from the generators that everybody uses."""

    def __init__(self, count):
        ((self.X, self.y),) = [batch[:2] for batch in numbered(1)]
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        index %= len(self.X)
        return self.X[index] + 0.1 * torch.randn(1, 6, 6), self.y[index]


def augmented(devices, max_in_flight, workers=0, name="dropout"):
    """Train two epochs of batches with random augmentation; return what came of it."""
    with open_trainer(build(name), devices=devices, max_in_flight=max_in_flight) as trainer:
        losses = []
        for _ in range(2):
            for batch in trainer.epoch(Loader(Augmented(72), 24, num_workers=workers)):
                losses += [trainer.step(*batch)]
        trainer.waitall()
        return outcome(trainer), [*map(float, losses)]


@functools.cache
def augmented_one_at_a_time(name):
    return augmented(1, 1, name=name)


@on_devices
@pytest.mark.parametrize("name", ["batch_norm", "dropout", "noisy"])
@pytest.mark.thinned(2)
def test_random_augmentation_while_a_model_that_draws_is_in_flight(devices, name):
    state, losses = augmented(devices, 2, name=name)
    expected, expected_losses = augmented_one_at_a_time(name)
    assert_same_bits(state, expected)
    assert losses == expected_losses


@pytest.mark.parametrize("devices", [2, own(2)], ids=str)
def test_random_augmentation_in_worker_processes(devices):
    state, losses = augmented(devices, 2, workers=2)
    expected, expected_losses = augmented_one_at_a_time("dropout")
    assert_same_bits(state, expected)
    assert losses == expected_losses
