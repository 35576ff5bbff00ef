"""What `get_extra_state` of modules returns is saved and restored."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import CheckpointError
from layouts import own
from reference import assert_same_bits, whole_state
from resuming import LOSS, X, Y, rewritten


class Warm(nn.Module):
    """A layer whose factor follows a number that the user raises; torch saves it as extra state."""

    def __init__(self, steps=0, history=()):
        super().__init__()
        self.steps = steps
        self.history = torch.tensor([*history])

    def forward(self, x):
        return x * (1 - 0.5 ** (self.steps + 1))

    def get_extra_state(self):
        return {"steps": self.steps, "history": self.history}

    def set_extra_state(self, state):
        self.steps, self.history = state["steps"], state["history"]


def warming(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), Warm(), nn.Linear(8, 5))
    model(X[:2])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def warm_up(trainer, model, until):
    while trainer.steps_done < until:
        trainer.step(X[:16], Y[:16])
        trainer.waitall()
        model[2].steps += 1
        model[2].history = torch.cat([model[2].history, torch.tensor([0.5])])


@pytest.mark.parametrize("devices", [1, own(2)], ids=str)
@pytest.mark.parametrize("background", [False, True])
def test_the_extra_state_of_modules_is_saved_and_restored(tmp_path, devices, background):
    model, optimizer = warming()
    with evenstep.Trainer(model, optimizer, LOSS, devices=devices) as trainer:
        warm_up(trainer, model, 2)
        trainer.save(tmp_path, background=background)
        warm_up(trainer, model, 4)
    again, optimizer = warming(seed=9)
    with evenstep.Trainer.load(tmp_path, again, optimizer, LOSS, devices=devices) as resumed:
        assert again[2].steps == 2
        assert again[2].history.tolist() == [0.5, 0.5]
        warm_up(resumed, again, 4)
    assert resumed.fingerprint(version=2) == trainer.fingerprint(version=2)
    assert_same_bits(whole_state(again, optimizer), whole_state(model, trainer.optimizer))


def refused_extra(folder, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        evenstep.Trainer.load(folder, model, optimizer, LOSS, devices=1)
    return str(caught.value)


@pytest.fixture
def warmed(tmp_path, request):
    """A checkpoint of a model with a `Warm` layer, or with the test's own kind of it."""
    model, optimizer = warming()
    model[2] = getattr(request, "param", Warm)()
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        warm_up(trainer, model, 2)
        trainer.save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("place", "layer", "line"),
    [
        (2, nn.Identity(), "extra state of 2 none instead of some"),
        (0, nn.Sequential(nn.Flatten(), Warm()), "extra state of 0.1 some instead of none"),
    ],
)
def test_a_model_with_other_extra_state_is_another_one(warmed, place, layer, line):
    model, _ = warming()
    model[place] = layer
    assert line in refused_extra(warmed, model)


class Forgets(Warm):
    def set_extra_state(self, state):
        pass


class Fails(Warm):
    def set_extra_state(self, state):
        raise KeyError("steps of another version")


class Reports(Warm):
    set_extra_state = nn.Module.set_extra_state


@pytest.mark.parametrize(
    ("warmed", "kind"), [(one, one) for one in (Forgets, Fails, Reports)], indirect=["warmed"]
)
def test_extra_state_that_is_not_taken_back_is_noticed(warmed, kind):
    model, _ = warming()
    model[2] = kind()
    line = refused_extra(warmed, model)
    assert "layer 2" in line
    assert kind.__name__ in line
    assert "set_extra_state" in line


@pytest.mark.parametrize("warmed", [Reports], indirect=True)
def test_extra_state_that_is_only_a_report_need_not_be_taken_back(warmed):
    model, _ = warming()
    model[2] = Reports(2, (0.5, 0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evenstep.Trainer.load(warmed, model, optimizer, LOSS, devices=1)


def test_extra_state_that_no_checkpoint_can_hold_is_refused_by_name(tmp_path):
    model, optimizer = warming()
    model[2].history = len
    trainer = evenstep.Trainer(model, optimizer, LOSS, devices=1)
    with pytest.raises(
        CheckpointError, match=r"\['model'\]\['extra'\]\['2'\]\['history'\] is of ty"
    ):
        trainer.save(tmp_path)


def test_a_checkpoint_without_extra_state_leaves_it_as_it_is(warmed):
    """As it did when no checkpoint had any."""
    rewritten(warmed, lambda tree: tree["model"].pop("extra"))
    model, optimizer = warming()
    model[2].steps = 7
    evenstep.Trainer.load(warmed, model, optimizer, LOSS, devices=1)
    assert model[2].steps == 7
