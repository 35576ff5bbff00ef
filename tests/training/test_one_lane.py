"""Steps that one device computes alone, because the help of others would make them longer."""

import random
import threading

import pytest
import torch
from torch import nn

from evenstep.batch.assignment import OneLaneChoice
from layouts import own, shared
from reference import assert_same_bits
from trainers import open_trainer, state_of


def train(devices, steps=24):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(1)
    with open_trainer(model, devices=devices) as trainer:
        for _ in range(steps):
            X = torch.randn(16, 6, generator=generator)
            trainer.step(X, torch.randint(3, (16,), generator=generator))
        return state_of(trainer)


@pytest.mark.parametrize("devices", [shared(2), own(3)], ids=["2 shared", "3 own"])
def test_who_computes_alone_changes_no_bit(devices, monkeypatch):
    expected = train(1)
    chance = random.Random(1)
    monkeypatch.setattr(OneLaneChoice, "is_better", lambda self: chance.random() < 0.5)
    assert_same_bits(train(devices), expected)


def test_a_device_whose_help_is_refused_computes_nothing(monkeypatch):
    monkeypatch.setattr(OneLaneChoice, "is_better", lambda self: True)
    threads = []

    def loss(output, y):
        threads.append(threading.current_thread().name)
        return nn.functional.cross_entropy(output, y)

    X, y = torch.randn(16, 4), torch.zeros(16, dtype=torch.long)
    with open_trainer(nn.Linear(4, 2), loss, devices=2, check="off") as trainer:
        trainer.step(X, y)  # shows every device its copy of the model
        assert len({*threads}) == 2
        for _ in range(5):
            threads.clear()
            trainer.step(X, y)
            assert len({*threads}) == 1
