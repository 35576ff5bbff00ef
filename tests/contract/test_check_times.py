"""When the contract of a step is checked, and that a check has no effect on the result."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import evenstep
from checked import (
    CLASSES,
    Momentum,
    X,
    Y,
    contrast,
    net,
    summed,
    train,
    write_in_place,
)
from evenstep.contract import self_check
from evenstep.errors import ContractError
from grouping import grouped
from reference import assert_same_bits
from taking_turns import in_turn
from trainers import sgd


@in_turn("check", ["first", "every 1", "every 2"])
def test_a_check_has_no_effect_on_the_bits(check, devices):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))

    batches = [(X, Y)] * 4
    expected, nothing = train(model(), batches=batches, check="off")
    state, report = train(model(), batches=batches, check=check, devices=devices)
    assert nothing is None
    assert report.seconds > 0
    assert_same_bits(state, expected)


def test_a_check_leaves_attributes_and_generators_as_they_were():
    class Counting(nn.Linear):
        last = 0.0

        def forward(self, x):
            self.last = float(x.sum())
            return super().forward(x + 0 * torch.rand_like(x))

    counted, plain = Counting(6, CLASSES), Counting(6, CLASSES)
    torch.manual_seed(5)
    train(counted, batches=[(X, Y)])
    drawn = torch.rand(3)
    torch.manual_seed(5)
    train(plain, batches=[(X, Y)], check="off")
    assert counted.last == plain.last
    assert torch.equal(drawn, torch.rand(3))


def calls_per_step(trainer_options, act=lambda trainer, step: None, steps=4):
    """Return how often the objective was called in each step."""
    calls, model = [], net()[:1]
    model.append(nn.Linear(8, CLASSES))

    def objective(model, X, y):
        calls[-1] += 1
        return summed(model, X, y)

    with evenstep.Trainer(
        model, sgd(model), **grouped(objective=objective, devices=1, **trainer_options)
    ) as trainer:
        for step in range(steps):
            calls.append(0)
            act(trainer, step)
            trainer.step(X, Y)
    return calls


@pytest.mark.parametrize(
    ("check", "calls"),
    [("first", [31, 11, 8, 11]), ("every 2", [31, 8, 31, 8]), ("off", [8, 8, 8, 8])],
    ids=["first", "every 2", "off"],
)
def test_when_it_checks(check, calls):
    assert calls_per_step({"check": check}) == calls


def test_a_change_of_the_layers_is_checked_again():
    def change(trainer, step):
        if step == 2:
            trainer.model.append(nn.Identity())

    assert calls_per_step({}, change) == [31, 11, 31, 8]


def test_later_checks_are_few_and_small():
    calls = calls_per_step({}, steps=64)
    checked = [step + 1 for step, called in enumerate(calls) if called > 8]
    assert checked == [1, 2, 4, 8, 16, 32, 64]
    assert [calls[step - 1] - 8 for step in checked[1:]] == [3] * 6


def test_without_sums_to_check_each_later_check_is_of_the_order():
    calls = calls_per_step({"separable": False}, steps=4)
    assert [called - 8 for called in calls[1:]] == [3, 0, 3]


def test_a_first_batch_of_one_shard_leaves_the_comparison_to_a_later_one():
    with pytest.raises(ContractError, match="does not add up"):
        train(nn.Linear(6, CLASSES), contrast, [(X[:1], Y[:1]), (X, Y)])


def test_a_resumed_training_is_checked_again(tmp_path):
    model = net()
    with evenstep.Trainer(model, sgd(model), objective=summed, devices=1) as trainer:
        trainer.step(X, Y)
        trainer.save(tmp_path)
    other = net()
    with (
        evenstep.Trainer.load(tmp_path, other, sgd(other), objective=contrast) as trainer,
        pytest.raises(ContractError, match="does not add up"),
    ):
        trainer.step(X, Y)


def test_a_refused_step_is_not_taken():
    model = nn.Linear(6, CLASSES)
    before = model.weight.detach().clone()
    with evenstep.Trainer(model, sgd(model), objective=contrast, devices=2) as trainer:
        for _ in range(2):  # refused again, if the error is caught
            with pytest.raises(ContractError):
                trainer.step(X, Y)
        assert trainer.steps_done == 0
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_an_error_of_the_users_code_is_the_steps_own_and_the_check_is_logged(caplog):
    caplog.set_level(logging.DEBUG, "evenstep")

    def broken(model, X, y):
        raise ZeroDivisionError("by the user")

    with pytest.raises(ZeroDivisionError, match="by the user") as caught:
        train(net(), broken)
    assert "in shard 0 (examples 0 to 3 of your batch) of step 0 on cpu:0" in caught.value.__notes__
    assert "the contract could not be checked" in caplog.text


@in_turn("check", ["first", "off", "first", "off"])
def test_a_parameter_written_in_a_later_step_is_refused(devices, check):
    class Late(Momentum):
        def forward(self, x):
            if x.sum() > 1e3:
                write_in_place(self.key.weight, self.query.weight)
            return self.query(x) + self.key(x)

    with pytest.raises(ContractError, match=r"key\.weight was written"):
        train(Late(None), batches=[(X, Y), (X + 1e4, Y)], devices=devices, check=check)


def test_sizes_and_arrays_in_attributes_do_not_disturb():
    model = net()
    model.size, model.table = torch.Size([6, 4]), np.eye(3)
    assert train(model)[1].unjudged == ""


def test_a_shard_may_write_to_its_own_examples():
    def objective(model, X, y):
        X.mul_(2)
        y.zero_()
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(model, optimizer, objective=objective, devices=1) as trainer:
        trainer.step(torch.randn(16, 4), torch.ones(16, dtype=torch.int64))


def compiled_in_place():
    layer = nn.Linear(6, CLASSES)
    layer.compile()
    return nn.Sequential(layer)


COMPILED = {
    "the model": lambda: torch.compile(nn.Linear(6, CLASSES)),
    "the layer 1": lambda: nn.Sequential(nn.ReLU(), torch.compile(nn.Linear(6, CLASSES))),
    "the layer 0": compiled_in_place,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about torch
@pytest.mark.parametrize("name", COMPILED)
def test_layers_that_the_user_has_compiled_are_refused(name):
    with pytest.raises(ContractError, match=rf"{name} was compiled.*Experiment\(compile=True\)"):
        train(COMPILED[name]())


def test_the_run_says_once_that_the_number_of_shards_is_part_of_it(caplog):
    train(nn.Linear(6, CLASSES), contrast, separable=False)
    (line,) = [one.message for one in caplog.records if "separable=False" in one.message]
    assert "8" in line


def test_steps_that_fail_do_not_use_up_the_check():
    is_broken, model = [True], nn.Linear(6, CLASSES)

    def objective(model, X, y):
        if is_broken:
            raise ZeroDivisionError
        return contrast(model, X, y)

    with evenstep.Trainer(model, sgd(model), objective=objective, devices=1) as trainer:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                trainer.step(X, Y)
        is_broken.clear()
        with pytest.raises(ContractError, match="does not add up"):
            trainer.step(X, Y)


def test_a_check_that_is_given_up_is_said(caplog, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no room\nfor one of these" + 200 * "\nbackend")

    monkeypatch.setattr(self_check, "check_contract", fail)
    train(net(), batches=[(X, Y)] * 5)
    (line,) = [one.message for one in caplog.records if "could not be checked in" in one.message]
    assert "RuntimeError: no room for one of these" in line
    assert len(line) < 500


@pytest.mark.parametrize("first", [0, 2])
def test_what_shards_keep_in_some_steps_only_is_no_reason_to_check_again(first, monkeypatch):
    """At most once more: when it is seen for the first time, it could be the user's change."""

    class Diary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.sizes = nn.Linear(6, CLASSES), []

        def forward(self, x):
            if step[0] >= first and step[0] % 3 == first:
                self.sizes = [len(x)]
            return self.layer(x)

    step, checked, check = [0], [], self_check.check_contract
    monkeypatch.setattr(
        self_check, "check_contract", lambda *given, **o: checked.append(0) or check(*given, **o)
    )
    model = Diary()
    with evenstep.Trainer(model, sgd(model), nn.CrossEntropyLoss(), devices=2) as trainer:
        for step[0] in range(9):
            trainer.step(X, Y)
    assert 1 <= len(checked) <= (1 if first == 0 else 2)
