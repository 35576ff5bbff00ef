"""An error in or after the update: the step is whole, or nothing, or the trainer refuses to go on.

Compared with trainings that no error has disturbed. What is counted, and what is refused, depends
on how far the update was when the error came.
"""

import contextlib
import types

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ClosedError
from grouping import grouped
from layouts import own
from reference import assert_same_bits
from trainers import state_of

LAYOUTS = {
    "one": {"devices": 1},
    "two": {"devices": 2},
    "own": {"devices": own(2)},
    "in flight": {"devices": 2, "max_in_flight": 2},
    "in flight, own": {"devices": own(2), "max_in_flight": 2},
    "stages": {"devices": 2, "divide": evenstep.Stages({"0": 0, "2": 1})},
}
one_at_a_time = [name for name, layout in LAYOUTS.items() if "max_in_flight" not in layout]
with_hooks = pytest.mark.parametrize("layout", one_at_a_time)  # in flight, hooks are refused
X, Y = torch.arange(48.0).reshape(16, 3) / 48, torch.arange(16) % 4
REFUSED = "step 2 failed .* between two steps: load the last checkpoint"


class Once:
    """Raises an error once, when it is told to."""

    def __init__(self):
        self.is_due = False

    def __call__(self, *_):
        if self.is_due:
            self.is_due = False
            raise LookupError("bang")


class PerParameter(torch.optim.Optimizer):
    """Momentum as people write it by hand, one parameter after the other; past the counters too."""

    def __init__(self, parameters, once, *, past_counters=False):
        super().__init__(parameters, {"lr": 0.1})
        self.once, self.past_counters = once, past_counters

    @torch.no_grad()
    def step(self, closure=None):
        for number, one in enumerate(self.param_groups[0]["params"]):
            if number == 3:
                self.once()
            state = self.state[one]
            state["velocity"] = 0.9 * state.get("velocity", 0) + one.grad
            target = one.data if self.past_counters else one
            target.sub_(self.param_groups[0]["lr"] * state["velocity"])


def adam(parameters, once):
    return torch.optim.Adam(parameters, lr=0.01)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))


def open_trainer(layout, make=adam, *, once=None, prepare=None, **options):
    model = network()
    optimizer = make(model.parameters(), once or Once())
    if prepare is not None:
        prepare(optimizer)
    given = {"shards": 4, **LAYOUTS[layout], **options}
    return evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**given))


def steps(trainer, number):
    for _ in range(number):
        trainer.step(X, Y)
    trainer.waitall()


def assert_refuses(trainer, folder):
    metrics = {"right": evenstep.metrics.accuracy}
    calls = {
        "step": lambda: trainer.step(X, Y),
        "backward": lambda: trainer.backward(X, Y),
        "evaluate": lambda: trainer.evaluate([(X, Y)], metrics),
        "predict": lambda: trainer.predict([X]),
        "save": lambda: trainer.save(folder),
        "save in the background": lambda: trainer.save(folder, background=True),
        "fingerprint": trainer.fingerprint,
        "waitall": trainer.waitall,
        "state_dict": trainer.optimizer.state_dict,
    }
    for call in calls.values():
        with pytest.raises(ClosedError, match=REFUSED):
            call()


def assert_half(trainer, once, folder):
    """Train two steps, fail in the third, and resume from a checkpoint after the second."""
    with trainer:
        steps(trainer, 2)
        trainer.save(folder)
        once.is_due = True
        with pytest.raises(LookupError, match="bang") as caught:
            steps(trainer, 1)
        assert any("load the last checkpoint" in note for note in caught.value.__notes__)
        assert trainer.steps_done == 2
        assert_refuses(trainer, folder)
    assert [one.name for one in folder.iterdir()] == ["step-00000002"]
    with trainer, pytest.raises(ClosedError, match=REFUSED):
        trainer.step(X, Y)  # opened again


def assert_even(trainer, once, undisturbed, *, taken):
    """Fail in the third step, which is taken as a whole or not at all, and go on."""
    with trainer, undisturbed:
        steps(trainer, 2)
        steps(undisturbed, 2 + taken)
        once.is_due = True
        with pytest.raises(LookupError, match="bang") as caught:
            steps(trainer, 1)
        notes = getattr(caught.value, "__notes__", [])
        assert any("step 2 was taken" in note for note in notes) == taken
        assert trainer.steps_done == 2 + taken
        assert_same_bits(state_of(trainer), state_of(undisturbed))
        steps(trainer, 2)
        steps(undisturbed, 2)
        assert_same_bits(state_of(trainer), state_of(undisturbed))


@pytest.mark.parametrize(
    ("layout", "past_counters"),
    [(layout, number % 2 == 1) for number, layout in enumerate(LAYOUTS)],
)
def test_an_optimizer_that_fails_at_its_fourth_parameter(layout, past_counters, tmp_path):
    once = Once()

    def make(parameters, once):
        return PerParameter(parameters, once, past_counters=past_counters)

    trainer = open_trainer(layout, make, once=once)
    assert_half(trainer, once, tmp_path)
    with open_trainer("one", make) as whole:
        steps(whole, 3)
        options = {**LAYOUTS[layout]}
        model, optimizer, loss = trainer.model, trainer.optimizer, nn.CrossEntropyLoss()
        with evenstep.Trainer.load(tmp_path, model, optimizer, loss, **grouped(**options)) as again:
            steps(again, 1)
            assert_same_bits(state_of(again), state_of(whole))


def test_a_step_behind_the_failed_one_is_not_taken(tmp_path):
    once = Once()
    with open_trainer("in flight", PerParameter, once=once) as trainer:
        steps(trainer, 2)
        once.is_due = True
        with pytest.raises(LookupError, match="bang"):
            steps(trainer, 3)
        assert trainer.steps_done == 2
        assert_refuses(trainer, tmp_path)


def schedule(optimizer):
    """A scheduler replaces the optimizer's `step`."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize("prepare", [schedule, lambda optimizer: None])
@with_hooks
def test_a_hook_after_the_optimizer_s_step(layout, prepare):
    """Registered before the trainer is opened, or in its `with`."""
    once, calls = Once(), []
    trainer = open_trainer(layout, prepare=prepare, after_update=calls.append)
    undisturbed = open_trainer(layout, prepare=prepare, after_update=lambda module: None)
    with trainer if prepare is not schedule else contextlib.nullcontext():
        trainer.optimizer.register_step_post_hook(once)
    assert_even(trainer, once, undisturbed, taken=True)
    assert len(calls) == 5  # it is called for the step that was taken, too


@pytest.mark.parametrize(
    ("place", "layout"),
    [
        *(("before_update", layout) for layout in LAYOUTS),
        *(("a hook before the optimizer's step", layout) for layout in one_at_a_time),
    ],
)
def test_before_the_optimizer_s_step_when_parameters_were_written(layout, place, tmp_path):
    once, model = Once(), []

    def decay(*_):
        with torch.no_grad():
            for number, one in enumerate(model[0].parameters()):
                if number == 3:
                    once()
                one.mul_(0.9)

    if place == "before_update":
        trainer = open_trainer(layout, before_update=decay)
    else:
        trainer = open_trainer(layout, prepare=lambda one: one.register_step_pre_hook(decay))
    model.append(trainer.model)
    assert_half(trainer, once, tmp_path)


# ---- optimizers that call others, or that were wrapped


class Decaying(torch.optim.SGD):
    """Calls the hooks twice: torch wraps the step of the parent class, too."""

    def __init__(self, parameters, once):
        torch.optim.SGD(parameters := [*parameters], lr=0.1)  # which torch then hooks
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.once = once

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for number, one in enumerate(self.param_groups[0]["params"]):
                if number == 3:
                    self.once()
                one.mul_(0.99)


class Wrapping(torch.optim.Optimizer):
    """Moves the parameters on after another optimizer's step, as Lookahead does."""

    def __init__(self, parameters, once):
        self.inner = torch.optim.SGD([*parameters], lr=0.1)
        self.param_groups, self.state, self.once = self.inner.param_groups, self.inner.state, once

    def step(self, closure=None):
        self.inner.step()
        with torch.no_grad():
            for number, one in enumerate(self.param_groups[0]["params"]):
                if number == 3:
                    self.once()
                one.mul_(0.99)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


def patched(parameters, once):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    original = optimizer.step

    def step(self, closure=None):
        original()
        once()
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one.mul_(0.99)

    optimizer.step = types.MethodType(step, optimizer)
    return optimizer


@pytest.mark.parametrize("make", [Decaying, Wrapping, patched])
def test_an_update_in_two_parts_that_fails_between_them(make, tmp_path):
    once = Once()
    assert_half(open_trainer("two", make, once=once), once, tmp_path)


def lbfgs(parameters, once):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


@pytest.mark.parametrize("layout", ["one", "two", "own"])
def test_lbfgs_is_rolled_back(layout):
    """That `after_update` leaves it counted is a case of test_errors_of_user_code."""
    once = Once()
    hooked = open_trainer(layout, lbfgs, prepare=lambda one: one.register_step_post_hook(once))
    assert_even(hooked, once, open_trainer(layout, lbfgs), taken=False)


def test_a_scheduler_that_fails_leaves_the_step_taken():
    once = Once()

    def rate(step):
        once()
        return 1.0

    trainer = open_trainer("two")
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, rate)
    with trainer, open_trainer("two") as undisturbed:
        steps(trainer, 1)
        steps(undisturbed, 1)
        once.is_due = True
        with pytest.raises(LookupError, match="bang"):
            scheduler.step()
        steps(trainer, 1)
        steps(undisturbed, 1)
        assert_same_bits(state_of(trainer), state_of(undisturbed))
