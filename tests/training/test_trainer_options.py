"""How a trainer takes its options: an experiment as one value, names that PyTorch users know."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import CheckpointError, InputError
from evenstep.training import session
from evenstep.training.trainer import TrainerOptions
from grouping import grouped
from trainers import sgd
from zoo import build, make_batches


def opened(**options):
    model = build("dropout")
    options = {"devices": 1, **options}
    return evenstep.Trainer(model, sgd(model), nn.CrossEntropyLoss(), **grouped(**options))


def trained(**options):
    with opened(**options) as t:
        for batch in make_batches((20, 13)):
            t.step(*batch)
        return t.fingerprint()


def test_an_experiment_is_given_as_one_value_or_by_keywords():
    experiment = evenstep.Experiment(shards=5, seed=3, precision="bf16")
    assert trained(experiment=experiment) == trained(shards=5, seed=3, precision="bf16")
    assert trained(experiment=experiment) != trained()


def test_keywords_refine_an_experiment():
    clipped = evenstep.Experiment(clip_norm=0.1, shards=5)
    trainer = opened(experiment=clipped, shards=5, seed=3)
    assert trainer.experiment == evenstep.Experiment(clip_norm=0.1, shards=5, seed=3)


def test_a_choice_that_is_given_twice_and_differs_is_refused():
    message = r"got shards=4 and experiment=Experiment\(shards=5\): give shards in one place only"
    with pytest.raises(InputError, match=message):
        opened(experiment=evenstep.Experiment(shards=5), shards=4)


def test_a_default_that_is_written_down_is_a_choice():
    with pytest.raises(InputError, match="give seed in one place only"):
        opened(experiment=evenstep.Experiment(seed=0), seed=3)
    assert opened(experiment=evenstep.Experiment(seed=0), seed=0).experiment.seed == 0
    taken = opened(experiment=evenstep.Experiment(clip_norm=1.0)).experiment
    with pytest.raises(InputError, match="give shards in one place only"):
        opened(experiment=taken, shards=4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_an_experiment_has_the_same_choices(copied):
    one = evenstep.Experiment(seed=0, clip_norm=1.0)
    assert copied(one) == one
    assert copied(one).given == one.given == {"seed", "clip_norm"}


@pytest.mark.parametrize("name", ["experiment", "layout", "faults"])
def test_a_group_of_options_that_is_none_is_refused(name):
    message = rf"got {name}=evenstep|got {name}=.*: give an evenstep.{name.capitalize()}\(...\)"
    with pytest.raises(InputError, match=message):
        opened(**{name: {"shards": 4}})


def test_there_are_at_most_18_parameters():
    assert len(inspect.signature(evenstep.Trainer).parameters) <= 18


@pytest.mark.parametrize("devices", [torch.device("cpu"), "cpu:0", 1, ["cpu:0"]], ids=str)
def test_one_device_may_be_named_in_many_ways(devices):
    model = build("convolution")
    trainer = evenstep.Trainer(model, sgd(model), nn.CrossEntropyLoss(), devices=devices)
    assert [device.name for device in trainer.devices] == ["cpu:0"]


def test_load_takes_the_keywords_of_a_trainer():
    """All but the four that it has itself, so that a type checker knows them."""
    keywords = set(inspect.signature(evenstep.Trainer).parameters)
    assert set(TrainerOptions.__annotations__) == keywords - {"model", "optimizer", "loss"}


def test_load_takes_the_same_experiment_and_refuses_another_one(tmp_path):
    def fresh():
        model = build("convolution")
        return model, sgd(model), nn.CrossEntropyLoss()

    with evenstep.Trainer(*fresh(), devices=1, shards=4) as trainer:
        trainer.save(tmp_path)
    same = evenstep.Experiment(shards=4)
    assert evenstep.Trainer.load(tmp_path, *fresh(), experiment=same).experiment.shards == 4
    assert evenstep.Trainer.load(tmp_path, *fresh(), shards=4).experiment.shards == 4
    none = evenstep.Experiment()
    assert evenstep.Trainer.load(tmp_path, *fresh(), experiment=none).experiment.shards == 4
    default = evenstep.Experiment(shards=8)  # the default, but written down
    for other in (
        {"experiment": evenstep.Experiment(shards=5)},
        {"experiment": default},
        {"experiment": evenstep.Experiment(clip_norm=1.0)},
        {"shards": 5},
        {"compile": True},
    ):
        with pytest.raises(CheckpointError, match="instead of"):
            evenstep.Trainer.load(tmp_path, *fresh(), **grouped(**other))


@pytest.mark.parametrize("tune_malloc", [True, False])
def test_the_allocator_can_be_left_alone(tune_malloc, monkeypatch):
    entered = []

    def noted(enabled=True):
        entered.append(enabled)
        return real(enabled)

    real = session.kept_memory
    monkeypatch.setattr(session, "kept_memory", noted)
    trained(tune_malloc=tune_malloc)
    assert entered == [tune_malloc]
