"""A folder with the checkpoints of an earlier training."""

import logging

import pytest
import torch
from torch import nn

import evenstep
from trainers import open_trainer

BATCH = torch.ones(16, 3), torch.arange(16) % 2


def saved(folder, steps, **options):
    with open_trainer(nn.Linear(3, 2), **options) as trainer:
        for _ in range(steps):
            trainer.step(*BATCH)
        for _ in range(2):
            path = trainer.save(folder, keep=1)
    return path


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING, "evenstep")

    def later():
        return [line for line in caplog.messages if "instead of" in line]

    return later


@pytest.mark.parametrize("devices", [1, 2])
def test_a_later_checkpoint_that_is_loaded_instead_is_named_once(tmp_path, lines, devices):
    saved(tmp_path, 5)
    assert not lines()
    saved(tmp_path, 2, devices=devices)
    (line,) = lines()
    assert "step-00000005" in line
    assert "step-00000002" in line


def test_a_training_that_goes_on_says_nothing(tmp_path, lines):
    saved(tmp_path, 3)
    model = nn.Linear(3, 2)
    given = model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()
    with evenstep.Trainer.load(tmp_path, *given, devices=1) as trainer:
        trainer.save(tmp_path)
        trainer.step(*BATCH)
        trainer.save(tmp_path)
    saved(tmp_path / "another", 1)
    assert not lines()
