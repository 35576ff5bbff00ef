"""Objects of the user's own that are saved and resumed with a training."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import evenstep
from evenstep.data import GeneratorStates
from evenstep.errors import CheckpointError, InputError
from loading import StatefulBatches
from trainers import sgd
from zoo import CLASSES


def model():
    torch.manual_seed(0)
    return nn.Linear(3, CLASSES)


class Keeper:
    """Keeps any state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Refusing(Keeper):
    def load_state_dict(self, state):
        raise KeyError("shadow")


def new(module, **options):
    options = {"devices": 1, "shards": 2, **options}
    return evenstep.Trainer(module, sgd(module), nn.CrossEntropyLoss(), **options)


def load(folder, module, **options):
    options = {"devices": 2, **options}
    return evenstep.Trainer.load(folder, module, sgd(module), nn.CrossEntropyLoss(), **options)


def batches(number):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 3, generator=generator), torch.arange(8) % CLASSES) for _ in range(number)
    ]


@pytest.mark.parametrize("background", [False, True])
def test_an_average_and_a_second_optimizer_are_resumed(tmp_path, background):
    class Training:
        def __init__(self):
            self.model = model()
            self.ema = AveragedModel(self.model)
            self.other = nn.Linear(2, 2, bias=False)
            nn.init.ones_(self.other.weight)
            self.second = torch.optim.Adam(self.other.parameters())
            parts = {"ema": self.ema, "second": self.second, "other": self.other}
            self.options = {"state": parts, "after_update": self.ema.update_parameters}

        def run(self, trainer, steps, folder=None):
            with trainer:
                for number, (X, y) in enumerate(batches(8)[steps]):
                    trainer.step(X, y)
                    self.other(torch.ones(2) * float(X.sum())).sum().backward()
                    self.second.step()
                    self.second.zero_grad()
                    if number == 4 and folder is not None:
                        trainer.save(folder, background=background)
            return [*self.ema.state_dict().values(), self.other.weight]

    whole = Training()
    expected = whole.run(new(whole.model, **whole.options), slice(0, 8))
    first = Training()
    first.run(new(first.model, **first.options), slice(0, 7), tmp_path)
    resumed = Training()
    got = resumed.run(load(tmp_path, resumed.model, **resumed.options), slice(5, 8))
    assert all(map(torch.equal, got, expected))
    assert resumed.second.state_dict()["state"][0]["step"] == 8


def test_the_default_generators_go_on(tmp_path):
    def drawn():
        return torch.rand(2).tolist(), random.random(), np.random.normal()

    module = model()
    np.random.normal()  # it makes two numbers at once, and keeps the second
    with new(module, state={"random": GeneratorStates()}) as trainer:
        trainer.step(*batches(1)[0])
        trainer.save(tmp_path)
    expected = drawn()
    drawn()
    load(tmp_path, model(), state={"random": GeneratorStates()})
    assert drawn() == expected


STATE = {
    "plain": [None, True, 3, -0.0, 1e300, "text", (1, [2])],
    ("a", 1): torch.arange(4, dtype=torch.int16),
    "nested": {"shared": torch.ones(2, 3).T, "empty": {}},
}


def test_a_state_comes_back_as_it_was(tmp_path):
    new(model(), state={"mine": Keeper(STATE)}).save(tmp_path)
    keeper = Keeper()
    load(tmp_path, model(), state={"mine": keeper})
    tensors = keeper.state.pop(("a", 1)), keeper.state["nested"].pop("shared")
    assert tensors[0].equal(STATE["a", 1])
    assert tensors[1].equal(torch.ones(3, 2))
    assert keeper.state == {"plain": STATE["plain"], "nested": {"empty": {}}}


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (3, "got state=3: give a dict of names and objects"),
        ({"": Keeper()}, "got the name '' in state: use letters"),
        ({"a/b": Keeper()}, "got the name 'a/b' in state"),
        ({"a\nb": Keeper()}, r"got the name 'a\\nb' in state"),
        ({3: Keeper()}, "got the name 3 in state"),
        ({"optimizer": Keeper()}, 'the name "optimizer" in state, which a checkpoint uses itself'),
        ({"cursor": Keeper()}, 'the name "cursor" in state, which a checkpoint uses itself'),
        ({"ema": object()}, r'state\["ema"\] is of type object: give an object with state_dict'),
        (
            {"ema": Keeper({"a": [object()]})},
            r"state_dict of state\[\"ema\"\] can't be saved: state\['ema'\]\['a'\]\[0\] is of type "
            r"object",
        ),
    ],
    ids=["number", "empty", "slash", "line", "key", "optimizer", "cursor", "object", "unencodable"],
)
def test_what_cannot_be_saved_is_refused_when_the_trainer_is_built(state, line):
    with pytest.raises(InputError, match=line) as caught:
        new(model(), state=state)
    assert "\n" not in str(caught.value)


def test_what_the_trainer_saves_itself_is_refused():
    module = model()
    optimizer = sgd(module)
    with pytest.raises(InputError, match=r'state\["mine"\] is the trainer\'s optimizer, which is'):
        evenstep.Trainer(module, optimizer, nn.CrossEntropyLoss(), state={"mine": optimizer})


def test_one_object_under_two_names_is_refused():
    keeper = Keeper()
    with pytest.raises(InputError, match='one object under two names, "a" and "b"'):
        new(model(), state={"a": keeper, "b": keeper})


def test_a_state_that_is_not_taken_back_is_named(tmp_path):
    new(model(), state={"ema": Keeper()}).save(tmp_path)
    with pytest.raises(CheckpointError, match=r'state\["ema"\] of type Refusing .*KeyError: \'sha'):
        load(tmp_path, model(), state={"ema": Refusing()})


def test_an_object_that_is_missing_is_named_before_anything_is_loaded(tmp_path):
    with new(model(), state={"ema": Keeper()}) as trainer:
        trainer.step(*batches(1)[0])
        trainer.save(tmp_path)
    module = model()
    before = module.weight.clone()
    with pytest.raises(CheckpointError, match=r'Trainer.load\(..., state={"ema": ...}\)'):
        load(tmp_path, module, state={"emma": Keeper()})
    assert module.weight.equal(before)


def test_an_object_that_is_new_stays_as_it_is(tmp_path, caplog):
    new(model()).save(tmp_path)
    keeper = Keeper(7)
    load(tmp_path, model(), state={"ema": keeper})
    assert keeper.state == 7
    message = 'the checkpoint has no state for state["ema"]: the object is not changed'
    assert message in caplog.messages


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, ["the position in a loader that you iterate", "the states of random"]),
        ({"ema": Keeper()}, ["the position in a loader that you iterate", "the states of random"]),
        ({"random": GeneratorStates()}, ["the position in a loader that you iterate"]),
        ({"loader": StatefulBatches()}, ["the states of random"]),
        ({"loader": StatefulBatches(), "random": GeneratorStates()}, []),
    ],
    ids=["nothing", "average", "generators", "loader", "both"],
)
def test_the_note_says_what_is_not_saved(tmp_path, caplog, state, named):
    caplog.set_level(logging.WARNING, "evenstep")
    with new(model(), state=state) as trainer:
        trainer.step(*batches(1)[0])
        trainer.save(tmp_path)
    text = " ".join(line for line in caplog.messages if "does not hold" in line)
    phrases = ["the position in a loader that you iterate", "the states of random"]
    assert [phrase for phrase in phrases if phrase in text] == named


# ---- schedulers


class Schedule:
    """What a program may keep its scheduler in."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def state_dict(self):
        return self.scheduler.state_dict()

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state)


@pytest.mark.parametrize("given", ["nothing", "after a load", "scheduler", "state", "in an object"])
def test_a_scheduler_that_is_not_saved_is_named_once(tmp_path, caplog, given):
    caplog.set_level(logging.WARNING, "evenstep")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if given == "after a load":
        state = optimizer.state_dict()
        del state["param_groups"][0]["initial_lr"]
        optimizer.load_state_dict(state)
    options = {
        "scheduler": {"scheduler": scheduler},
        "state": {"state": {"own": scheduler}},
        "in an object": {"state": {"own": Schedule(scheduler)}},
    }.get(given, {})
    loss = nn.CrossEntropyLoss()
    with evenstep.Trainer(net, optimizer, loss, devices=1, **options) as trainer:
        for batch in trainer.epoch(batches(2)):
            trainer.step(*batch)
            scheduler.step()
            trainer.save(tmp_path)
    said = [line for line in caplog.messages if "does not hold the learning-rate scheduler" in line]
    assert len(said) == (given in ("nothing", "after a load"))


def test_nothing_is_said_of_a_scheduler_where_there_is_none(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "evenstep")
    with new(model()) as trainer:
        trainer.step(*batches(1)[0])
        trainer.save(tmp_path)
    assert "scheduler" not in caplog.text
