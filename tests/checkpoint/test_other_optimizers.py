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


# ---- groups


def in_groups(rates, **settings):
    """Return what makes an optimizer with a group for each parameter, in the order of `rates`."""

    def make(parameters):
        each = [*parameters]
        groups = [{"params": [each[place]], "lr": rate} for place, rate in rates.items()]
        return torch.optim.SGD(groups, **settings)

    return make


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_groups_in_another_order_are_refused(tmp_path, momentum):
    """Their rates would go to other parameters; without momentum nothing else tells them apart."""
    saved_with(in_groups({0: 0.1, 2: 0.01}, momentum=momentum), tmp_path)
    line = refused_by(tmp_path, in_groups({2: 0.01, 0: 0.1}, momentum=momentum))
    assert "the parameters of group 0 ['" in line
    assert line.endswith("in the order and the groups in which they were trained")


def test_a_rate_that_groups_share_is_shared_again(tmp_path):
    rate = torch.tensor(0.1)

    def make(parameters):
        each = [*parameters]
        groups = [{"params": each[:2]}, {"params": each[2:]}, {"params": [], "lr": rate.clone()}]
        return torch.optim.Adam(groups, lr=rate.clone())

    saved_with(make, tmp_path)
    rates = [group["lr"] for group in loaded(tmp_path, make).optimizer.param_groups]
    assert rates[0] is rates[1] is not rates[2]
    assert rates == [rate] * 3


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lr", "0.1", "lr of the saved group 0 is '0.1'"),
        ("lr", None, "lr of the saved group 0 is None"),
        ("lr", torch.ones(2), "lr of the saved group 0 is tensor"),
        ("betas", (0.9,), "betas of the saved group 0 is (0.9,)"),
        ("betas", 5, "betas of the saved group 0 is 5"),
        ("eps", ..., "eps of the saved group 0 is missing"),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_refused_before_a_step(tmp_path, key, value, said):
    saved_with(torch.optim.Adam, tmp_path)

    def change(tree):
        (group,) = tree["optimizer"]["param_groups"]
        group[key] = value
        if value is ...:
            del group[key]

    rewritten(tmp_path, change)
    assert said in refused_by(tmp_path, torch.optim.Adam)


@pytest.mark.parametrize("inner", [5, []])
def test_inner_optimizers_of_another_type_are_refused(tmp_path, inner):
    saved_with(torch.optim.Adam, tmp_path)
    rewritten(tmp_path, lambda tree: tree["optimizer"].update(inner_optimizers=inner))
    assert "as optimizers inside another one" in refused_by(tmp_path, torch.optim.Adam)


# ---- numbers that only an attribute has


class Counting(torch.optim.SGD):
    """Divides its rate by the number of its steps."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.done = 0

    def step(self, closure=None):
        self.done += 1
        super().step(closure)


class Saving(Counting):
    def state_dict(self):
        return {**super().state_dict(), "done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]
        super().load_state_dict({key: one for key, one in state.items() if key != "done"})


@pytest.mark.parametrize("kind", [Counting, Saving, torch.optim.SGD])
def test_a_count_that_no_checkpoint_holds_is_named_once(tmp_path, caplog, kind):
    saved_with(lambda p: kind(p) if kind is not torch.optim.SGD else kind(p, 0.1), tmp_path)
    lines = [one for one in caplog.messages if "which changed during the training" in one]
    assert [line.split(",")[0] for line in lines] == (
        ["the checkpoint does not hold optimizer.done"] if kind is Counting else []
    )


@pytest.mark.parametrize("changes", [False, True])
def test_a_number_of_the_model_that_no_checkpoint_holds_is_named_once(tmp_path, caplog, changes):
    model = build("convolution")
    model.own = type("Own", (torch.nn.Identity,), {"__module__": "mine"})()
    model.own.warmth = 1.0
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(model, made, LOSS, devices=1) as trainer:
        for steps in (1, 2):
            run(trainer, steps)
            if changes:
                model.own.warmth *= 0.5
            trainer.save(tmp_path)
    lines = [one for one in caplog.messages if "which changed during the training" in one]
    assert [line.split(",")[0] for line in lines] == (
        ["the checkpoint does not hold model.own.warmth"] if changes else []
    )
