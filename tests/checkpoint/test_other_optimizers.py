"""A checkpoint is loaded into an optimizer of its own class and settings only."""

import copy
import itertools

import numpy as np
import pytest
import torch

import evenstep
from evenstep.checkpoint.fingerprint import named_state
from evenstep.errors import CheckpointError
from reference import assert_same_bits
from resuming import LOSS, rewritten, run
from zoo import build

ADAMS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
}


def saved_with(optimizer, folder, **options):
    model = build("convolution")
    made = optimizer(model.parameters())
    with evenstep.Trainer(model, made, LOSS, devices=1, **options) as trainer:
        run(trainer, 2)
        trainer.save(folder)
    return trainer


def loaded(folder, optimizer, seed=0):
    model = build("convolution", seed)
    return evenstep.Trainer.load(folder, model, optimizer(model.parameters()), LOSS, devices=1)


def refused_by(folder, optimizer):
    """Return what is said to another optimizer; model and optimizer must stay as they are."""
    model = build("convolution", seed=9)
    made = optimizer(model.parameters())
    before = {name: value.clone() for name, value in named_state(model, made)}
    settings = copy.deepcopy(made.state_dict()["param_groups"])
    with pytest.raises(CheckpointError) as caught:
        evenstep.Trainer.load(folder, model, made, LOSS, devices=1)
    assert_same_bits(dict(named_state(model, made)), before)
    assert made.state_dict()["param_groups"] == settings
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("saved", "given"), [*itertools.pairwise([*ADAMS, "Adam"])])
def test_the_state_of_another_optimizer_is_refused_by_naming_both(tmp_path, saved, given):
    """Of optimizers with the same settings, each is given the state of the one before."""
    saved_with(lambda p: ADAMS[saved](p, lr=0.01), tmp_path)
    line = refused_by(tmp_path, lambda p: ADAMS[given](p, lr=0.01))
    then, now = (f"torch.optim.{name.lower()}.{name}" for name in (saved, given))
    assert f"the class of the optimizer {now} instead of {then}" in line
    assert "the checkpoint is of a different optimizer: give the one" in line
    with loaded(tmp_path, lambda p: ADAMS[saved](p, lr=0.01), seed=9) as trainer:
        run(trainer, 3)


def test_other_settings_of_an_optimizer_are_refused_by_naming_both(tmp_path):
    """They had no effect: a checkpoint's settings replaced them, and nobody was told."""
    saved_with(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), tmp_path)
    line = refused_by(tmp_path, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True))
    assert line.startswith(
        "can't resume with lr of the optimizer 0.05 instead of 0.1, nesterov of the optimizer True "
        "instead of False: "
    )


def test_a_setting_that_only_one_version_of_torch_knows_is_no_difference(tmp_path):
    saved_with(lambda p: torch.optim.SGD(p, lr=0.1), tmp_path)

    def other_version(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.defaults["newer"] = True
        del optimizer.defaults["differentiable"]
        return optimizer

    loaded(tmp_path, other_version)


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (0.1, np.float64(0.1)),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.tensor(0.1), 0.1),
        (1, 1.0),
    ],
    ids=["numpy", "tensors", "a tensor", "an integer"],
)
def test_settings_that_are_equal_or_may_change_in_place_are_no_difference(tmp_path, saved, given):
    """Schedulers write to a rate that is a tensor, and so to the default that it came from."""
    saved_with(lambda p: torch.optim.SGD(p, lr=saved), tmp_path)
    trainer = loaded(tmp_path, lambda p: torch.optim.SGD(p, lr=given))
    assert float(trainer.optimizer.param_groups[0]["lr"]) == pytest.approx(float(saved))


class Rule(torch.optim.SGD):
    """Has a default that no checkpoint can hold."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)
        self.defaults["rule"] = len


def test_a_default_that_no_checkpoint_can_hold_is_not_compared(tmp_path):
    saved_with(lambda p: Rule(p, lr=0.1), tmp_path)
    line = refused_by(tmp_path, lambda p: Rule(p, lr=0.2))
    assert "with lr of the optimizer 0.2 instead of 0.1: " in line
    loaded(tmp_path, lambda p: Rule(p, lr=0.1))


def test_a_class_may_be_in_a_script_now_and_in_a_module_later(tmp_path, monkeypatch):
    monkeypatch.setattr(Rule, "__module__", "__main__")
    saved_with(lambda p: Rule(p, lr=0.1), tmp_path)
    monkeypatch.undo()
    loaded(tmp_path, lambda p: Rule(p, lr=0.1))


def test_a_class_of_the_same_name_as_one_of_torch_is_another_one(tmp_path):
    class SGD(torch.optim.SGD):
        pass

    SGD.__qualname__ = "SGD"
    saved_with(lambda p: torch.optim.SGD(p, lr=0.1), tmp_path)
    line = refused_by(tmp_path, lambda p: SGD(p, lr=0.1))
    assert "the class of the optimizer SGD instead of torch.optim.sgd.SGD" in line


class Outer(torch.optim.SGD):
    def __init__(self, parameters, kind=torch.optim.Adam):
        parameters = [*parameters]
        super().__init__(parameters, lr=0.1)
        self.inner = kind(parameters, lr=0.01)


def test_an_optimizer_inside_another_one_is_compared_too(tmp_path):
    saved_with(Outer, tmp_path)
    line = refused_by(tmp_path, lambda p: Outer(p, torch.optim.RAdam))
    assert "optimizer.inner torch.optim.radam.RAdam instead of torch.optim.adam.Adam" in line


def test_a_checkpoint_without_the_class_loads_as_before(tmp_path):
    trainer = saved_with(lambda p: torch.optim.SGD(p, lr=0.1), tmp_path)
    rewritten(tmp_path, lambda tree: tree.pop("optimizers"))
    again = loaded(tmp_path, lambda p: torch.optim.SGD(p, lr=0.2), seed=9)
    assert again.fingerprint() == trainer.fingerprint()
    assert again.fingerprint(version=2) == trainer.fingerprint(version=2)
