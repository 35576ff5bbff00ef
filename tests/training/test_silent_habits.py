"""Habits of loops that would silently train something else, or nothing: each is said, once."""

import logging

import pytest
import torch
from torch import nn

import evenstep
from evenstep.data import Loader
from grouping import grouped

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
y = torch.arange(24) % 4
LAYOUTS = {"one": {}, "two": {"devices": 2}, "own": {"devices": ["cpu:0", "cpu:1:own"]}}

on_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def _said(caplog):
    caplog.set_level(logging.WARNING, "evenstep")


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trainer_of(model, optimizer, **options):
    options = {"shards": 2, "check": "off", "tune_malloc": False, "devices": 1, **options}
    return evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options))


def loader():
    return Loader(torch.utils.data.TensorDataset(X, y), 8, seed=3)


def an_epoch(trainer):
    with trainer:
        for batch in trainer.epoch(loader()):
            trainer.step(*batch)


# ---- a trainer for each epoch


@on_layouts
def test_a_trainer_for_each_epoch(layout, caplog):
    given = parts()
    for _ in range(2):
        an_epoch(trainer_of(*given, **LAYOUTS[layout]))
    assert caplog.text.count("another trainer has done 3 steps with this optimizer") == 1
    assert "trainer.cursor.epoch < epochs" in caplog.text


def test_one_trainer_that_is_opened_again_goes_on_in_silence(caplog):
    trainer = trainer_of(*parts())
    for _ in range(2):
        an_epoch(trainer)
    assert trainer.steps_done == 6
    assert not caplog.records


def test_a_trainer_that_was_loaded_goes_on_in_silence(caplog, tmp_path):
    model, optimizer = parts()
    trainer = trainer_of(model, optimizer)
    an_epoch(trainer)
    trainer.save(tmp_path)
    an_epoch(evenstep.Trainer.load(tmp_path, model, optimizer, nn.CrossEntropyLoss(), devices=1))
    assert not caplog.records


def test_a_trainer_that_has_done_nothing_is_no_earlier_one(caplog):
    given = parts()
    with trainer_of(*given):
        pass
    an_epoch(trainer_of(*given))
    assert not caplog.records


def test_a_loaded_trainer_that_is_thrown_away(caplog, tmp_path):
    trainer = trainer_of(*parts())
    an_epoch(trainer)
    trainer.save(tmp_path)
    model, optimizer = parts()
    evenstep.Trainer.load(tmp_path, model, optimizer, nn.CrossEntropyLoss(), devices=1)
    an_epoch(trainer_of(model, optimizer))
    assert caplog.text.count("Trainer.load has returned a trainer that continues after step 3") == 1


# ---- gradients that were used already


@on_layouts
def test_gradients_that_are_clipped_after_the_step(layout, caplog):
    model, optimizer = parts()
    with trainer_of(model, optimizer, **LAYOUTS[layout]) as trainer:
        for _ in range(3):
            optimizer.zero_grad()
            trainer.step(X, y)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert caplog.text.count("Experiment(clip_norm=...)") == 1


@on_layouts
def test_gradients_that_are_only_read_or_zeroed(layout, caplog):
    model, optimizer = parts()
    options = dict(LAYOUTS[layout])
    options["before_update"] = lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    with trainer_of(model, optimizer, **options) as trainer:
        for number in range(4):
            trainer.step(X, y)
            assert all(one.grad.norm() > 0 for one in model.parameters())
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    assert not caplog.records


@on_layouts
def test_gradients_of_a_backward_pass_are_the_users(layout, caplog):
    model, optimizer = parts()
    with trainer_of(model, optimizer, **LAYOUTS[layout]) as trainer:
        for _ in range(3):
            trainer.backward(X, y)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert not caplog.records


@pytest.mark.parametrize("to_none", [True, False])
def test_sparse_gradients_that_are_zeroed(to_none, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer_of(model, optimizer) as trainer:
        for _ in range(3):
            trainer.step(torch.arange(48).reshape(24, 2) % 5, y)
            optimizer.zero_grad(set_to_none=to_none)
    assert not caplog.records


# ---- the mode


@on_layouts
def test_a_model_that_is_set_to_evaluation_in_the_middle(layout, caplog):
    model, optimizer = parts()
    with trainer_of(model, optimizer, **LAYOUTS[layout]) as trainer:
        trainer.step(X, y)
        assert not caplog.records
        model.eval()
        for _ in range(3):
            trainer.step(X, y)
    assert caplog.text.count("evaluation mode, which changes what Dropout compute") == 1


def test_a_model_that_is_in_training_mode_where_it_steps(caplog):
    model, optimizer = parts()
    with trainer_of(model, optimizer) as trainer:
        for _ in range(2):
            model.train()
            trainer.step(X, y)
            model.eval()
            model(X)
    assert not caplog.records


def test_a_layer_in_training_mode_inside_a_model_that_is_not(caplog):
    model, optimizer = parts()
    model.training = False
    with trainer_of(model, optimizer) as trainer:
        trainer.step(X, y)
    assert not caplog.records


# ---- a second optimizer


@on_layouts
def test_a_second_optimizer_steps_with_the_gradients_of_the_step_as_in_plain_torch(layout):
    """Of parameters that the trainer's optimizer doesn't hold: their gradients were not used."""

    def two():
        model, _ = parts()
        model[1].p = 0.0  # plain torch would draw other numbers
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return model, first, torch.optim.Adam(model[2].parameters(), lr=0.1)

    plain, *both = two()
    for _ in range(3):
        for one in both:
            one.zero_grad()
        nn.functional.cross_entropy(plain(X), y).backward()
        for one in both:
            one.step()
    model, first, second = two()
    with trainer_of(model, first, **LAYOUTS[layout]) as trainer:
        for _ in range(3):
            trainer.step(X, y)
            second.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
