"""Optimizers beside the trainer's own that have stepped the model: `save` names what it lacks."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import evenstep
from grouping import grouped
from reference import assert_same_bits
from trainers import sgd
from zoo import build, make_batches

LOSS = nn.CrossEntropyLoss()
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
X, Y = make_batches((16,))[0]


class Pair:
    """A model in two halves, each with an optimizer: the trainer has the first."""

    def __init__(self, second=ADAM):
        self.model = build("convolution")
        first, *rest = self.model.parameters()
        self.first = torch.optim.SGD([first], lr=0.1)
        self.second = second(rest)

    def step(self, trainer):
        trainer.backward(X, Y)
        self.first.step()
        self.second.step()

    def trainer(self, **options):
        return evenstep.Trainer(self.model, self.first, LOSS, **grouped(devices=1, **options))


class Bundle:
    """An object of the user's own that saves an optimizer with other things."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"parts": [self.optimizer.state_dict()], "epoch": 3}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["parts"][0])


@pytest.fixture
def lines(caplog):
    """The lines that say what a checkpoint lacks of other optimizers."""
    caplog.set_level(logging.WARNING, "evenstep")
    return lambda: [text for text in caplog.messages if "optimizer" in text]


def test_a_second_optimizer_that_is_not_saved_is_named_once(tmp_path, lines):
    pair = Pair()
    with pair.trainer() as trainer:
        trainer.save(tmp_path)  # it has not stepped anything yet
        assert not lines()
        for _ in range(2):
            pair.step(trainer)
            trainer.save(tmp_path)
    (line,) = lines()
    assert "Adam" in line
    names = [name for name, _ in pair.model.named_parameters()]
    assert names[1] in line
    assert names[0] not in line.split()
    assert 'state={"adam": ...}' in line
    assert not _global_optimizer_post_hooks


@pytest.mark.parametrize("wrap", [lambda one: one, Bundle], ids=["itself", "in an object"])
def test_a_second_optimizer_in_state_is_resumed_without_a_word(tmp_path, lines, wrap):
    whole, begun, resumed = Pair(), Pair(), Pair()
    with whole.trainer() as trainer:
        for _ in range(4):
            whole.step(trainer)
    with begun.trainer(state={"second": wrap(begun.second)}) as trainer:
        for _ in range(2):
            begun.step(trainer)
        trainer.save(tmp_path)
    state = {"second": wrap(resumed.second)}
    given = resumed.model, resumed.first, LOSS
    with evenstep.Trainer.load(tmp_path, *given, devices=2, state=state) as trainer:
        for _ in range(2):
            resumed.step(trainer)
        trainer.save(tmp_path)
    assert_same_bits(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    assert not lines()


def test_an_optimizer_without_state_has_nothing_to_save(tmp_path, lines):
    pair = Pair(functools.partial(torch.optim.SGD, lr=0.1))
    with pair.trainer() as trainer:
        pair.step(trainer)
        trainer.save(tmp_path)
    assert not lines()


def test_optimizers_of_other_models_are_not_named(tmp_path, lines):
    other = nn.Linear(3, 2)
    optimizer = ADAM(other.parameters())
    model = build("convolution")
    with evenstep.Trainer(model, sgd(model), LOSS, devices=1) as trainer:
        trainer.step(X, Y)
        other(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        trainer.save(tmp_path)
    assert not lines()


def test_the_optimizer_of_another_trainer_is_not_named(tmp_path, lines):
    pair = Pair()
    options = {"devices": 1}
    with (
        evenstep.Trainer(pair.model, pair.first, LOSS, **grouped(**options)) as one,
        evenstep.Trainer(pair.model, pair.second, LOSS, **grouped(**options)) as other,
    ):
        for trainer in (one, other):
            trainer.step(X, Y)
        one.save(tmp_path / "one")
        other.save(tmp_path / "other")
    assert not lines()


@pytest.mark.parametrize(
    "options",
    [{"max_in_flight": 2}, {"divide": evenstep.Owners()}, {}],
    ids=["in flight", "by owners", "at once"],
)
def test_the_trainers_own_optimizer_is_not_named(tmp_path, lines, options):
    model = build("convolution")
    with evenstep.Trainer(
        model, ADAM(model.parameters()), LOSS, **grouped(devices=2, **options)
    ) as trainer:
        for _ in range(3):
            trainer.step(X, Y)
        trainer.save(tmp_path)
    assert not lines()


def test_an_optimizer_inside_the_trainers_own_is_not_named(tmp_path, lines):
    """Its state is saved with the outer one's."""
    model = build("convolution")
    outer = Outer(model.parameters())
    with evenstep.Trainer(model, outer, LOSS, devices=1) as trainer:
        trainer.step(X, Y)
        trainer.save(tmp_path)
    assert not lines()


class Outer(torch.optim.Optimizer):
    """Steps another optimizer, which has the state."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        self.base = torch.optim.Adam(self.param_groups, lr=0.01)

    def step(self, closure=None):
        return self.base.step(closure)
