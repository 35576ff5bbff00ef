"""Stages that can't be, errors inside a stage, Ctrl-C, and lanes that end: nothing hangs."""

import copy
import os
import signal
import threading
import time
import types

import pytest
import torch
from torch import nn

import evenstep
from dying import end_lane
from evenstep.errors import ContractError, DeviceLostError, EvenstepError
from evenstep.metrics import accuracy
from evenstep.models.gpt import gpt
from layouts import own, shared
from patience import HUNG_TESTS_ABORT, PATIENCE_S
from reference import assert_same_bits
from trainers import open_trainer, state_of
from zoo import CLASSES, build, make_batches

pytestmark = HUNG_TESTS_ABORT

BATCHES = make_batches((24, 17, 24))
BAD = BATCHES[0][0].clone(), BATCHES[0][1]
BAD[0][10] *= 1e6  # in shard 3
STAGES = {"0": 0, "4": 1}


def staged(model, stages=STAGES, **options):
    return open_trainer(model, **{"devices": 2, "divide": evenstep.Stages(stages), **options})


def refused(match, model, *batch, **options):
    """Take a step that is refused in one line, which changes nothing."""
    with staged(model, **options) as trainer:
        before = state_of(trainer)
        with pytest.raises(ContractError, match=match) as caught:
            trainer.step(*(batch or BATCHES[0]))
        assert_same_bits(state_of(trainer), before)
    assert "\n" not in str(caught.value)


# ---- options


def test_one_stage_is_the_whole_network():
    with staged(build("dropout"), {"0": 0}) as one, open_trainer(build("dropout")) as other:
        for batch in BATCHES:
            one.step(*batch)
            other.step(*batch)
        assert_same_bits(state_of(one), state_of(other))


# ---- models


class Three(nn.Module):
    """Three layers, for models that call them in some way."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(36, 36), nn.Linear(36, 36)
        self.head = nn.Linear(36, CLASSES)


class Returning(Three):
    """Calls a module of the first stage after one of the second."""

    def forward(self, x):
        return self.head(self.one(self.two(self.one(x.flatten(1)))))


class Uncalled(Three):
    """Uses the weight of a layer of the second stage in the first."""

    def forward(self, x):
        x = nn.functional.linear(self.one(x.flatten(1)), self.two.weight)
        return self.head(x)


class Skipping(Three):
    def forward(self, x):
        x = self.one(x.flatten(1)).tanh()
        return self.head(x + self.two(x))


def tied():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36))
    model[3].weight = model[1].weight
    return model


def called_twice(model, x, y):
    return nn.functional.cross_entropy(model(x) + model(-x), y, reduction="sum"), len(y)


CUT = {"one": 0, "two": 1}
REFUSED = {
    "back and forth": (
        "'one' of stage 0 was called after modules of stage 1",
        Returning,
        {"stages": CUT},
    ),
    "a weight used elsewhere": (
        "two.weight lies in stage 1 but is used in stage 0",
        Uncalled,
        {"stages": CUT},
    ),
    "a model called twice": (
        "call the model once in the objective",
        lambda: build("dropout"),
        {"objective": called_twice},
    ),
    "a skip over a cut between two memories": (
        r"a tensor of stage 0 \(TanhBackward0\) is used in stage 1 without being passed",
        Skipping,
        {"devices": own(2), "stages": CUT},
    ),
    "tied weights of two memories": (
        "1.weight belongs to the stages 0 and 1",
        tied,
        {"devices": own(2), "stages": {"1": 0, "3": 1}},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_staged_so(name):
    message, make_model, options = REFUSED[name]
    refused(message, make_model(), **options)


def test_an_embedding_that_a_function_uses_in_another_memory():
    options = {
        "objective": lambda model, given: (model(given).square().sum(), len(given)),
        "devices": own(2),
        "stages": {"tokens": 0, "norm": 1},
    }
    model, batch = gpt(layers=1, heads=2, width=8, context=12), torch.randint(65, (8, 12))
    refused(r"tokens.weight lies in stage 0 but is used in .*1", model, batch, **options)


def test_a_named_module_that_the_user_removes():
    model = Skipping()
    with staged(model, {"one": 0, "two": 1}) as trainer:
        trainer.step(*BATCHES[0])
        model.other = model.two
        del model.two
        model.forward = lambda x: model.head(model.other(model.one(x.flatten(1))))
        with pytest.raises(EvenstepError, match="Stages names the module 'two'"):
            trainer.step(*BATCHES[1])  # the lambda is not copied with the module
        model.forward = types.MethodType(lambda self, x: self.head(self.other(self.one(x))), model)
        with pytest.raises(EvenstepError, match="Stages names the module 'two'"):
            trainer.step(*BATCHES[1])


# ---- errors, Ctrl-C, and lanes that end


class Failing(nn.Module):
    """Fails on the shards that hold a large value."""

    def __init__(self, *, backward=False):
        super().__init__()
        self.layer = nn.Linear(36, CLASSES)
        self.backward = backward

    def forward(self, x):
        x = self.layer(x)
        if self.backward:
            x.register_hook(self.fail)
        else:
            self.fail(x)
        return x

    def fail(self, x):
        if x.abs().max() > 1e3:
            raise LookupError("too large")


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_error_names_shard_stage_device_and_module(max_in_flight):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), Failing())
    with staged(model, {"1": 0, "2": 1}, max_in_flight=max_in_flight) as trainer:
        trainer.step(*BATCHES[0])
        trainer.waitall()
        before = state_of(trainer)
        with pytest.raises(LookupError, match="too large") as caught:
            trainer.step(*BAD).item()
        assert_same_bits(state_of(trainer), before)
        notes = caught.value.__notes__
        assert any("in shard 3 (examples 9 to 11" in note and "cpu:1" in note for note in notes)
        assert "in stage 1, in the module '2.layer' or after it" in notes
        trainer.step(*BATCHES[1])
        trainer.waitall()


def test_an_error_in_a_backward_pass():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), Failing(backward=True))

    def objective(model, x, y):
        return (model(x) * torch.where(y == 0, 1e9, 1.0)[:, None]).sum(), len(y)

    model[2].layer.weight.data.fill_(1.0)
    options = {"stages": {"1": 0, "2": 1}, "objective": objective, "check": "off"}
    refusal = pytest.raises(LookupError, match="too large")
    with staged(model, **options) as trainer, refusal as caught:
        trainer.step(*BATCHES[0])
    assert any(note.startswith("in stage 1") for note in caught.value.__notes__)


CALLS = {
    "step": lambda trainer: trainer.step(*BATCHES[1]).item(),
    "evaluate": lambda trainer: trainer.evaluate([BATCHES[1]], {"accuracy": accuracy}),
}


@pytest.mark.parametrize("waiting", CALLS)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_nothing_waits_for_a_lane_that_has_ended(waiting, max_in_flight):
    with staged(build("dropout"), max_in_flight=max_in_flight) as trainer:
        trainer.step(*BATCHES[0])
        trainer.waitall()
        before = trainer.fingerprint()
        end_lane(trainer._engine, 1)
        for _ in range(2):
            with pytest.raises(DeviceLostError, match="cpu:1 was lost"):
                CALLS[waiting](trainer)
        with pytest.raises(DeviceLostError, match="with it stage 1 of the network: save, and"):
            trainer.step(*BATCHES[1]).item()
        assert trainer.fingerprint() == before


class Hanging(nn.Module):
    """Stands still in one shard, until it is released."""

    def __init__(self, released):
        super().__init__()
        self.layer = nn.Linear(36, CLASSES)
        self.released = [released]  # an event, which all copies of the module share
        self.is_due = False

    def __deepcopy__(self, memo):
        copied = Hanging(self.released[0])
        copied.layer, copied.is_due = copy.deepcopy(self.layer, memo), self.is_due
        return copied

    def forward(self, x):
        x = self.layer(x)
        if self.is_due and x.abs().max() > 1e3:
            assert self.released[0].wait(PATIENCE_S)
        return x


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_shard_that_stands_still_ends_the_step_and_names_the_stage(max_in_flight):
    released = threading.Event()
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), Hanging(released))
    options = {"max_in_flight": max_in_flight, "lost_after_s": 0.2, "check": "off"}
    try:
        with staged(model, {"1": 0, "2": 1}, **options) as trainer:
            trainer.step(*BATCHES[0])
            trainer.waitall()
            before = state_of(trainer)
            model[2].is_due = True
            began_s = time.monotonic()
            with pytest.raises(DeviceLostError, match="was lost") as caught:
                trainer.step(*BAD).item()
            assert time.monotonic() - began_s < PATIENCE_S / 2  # nothing waits for the shard
            assert_same_bits(state_of(trainer), before)
            note = "shard 3 stood still on cpu:1, in stage 1, in the module '2.layer' or after it"
            assert note in caught.value.__notes__
            with pytest.raises(DeviceLostError, match="cpu:1 was lost, and with it stage 1 of"):
                trainer.step(*BATCHES[1]).item()
            released.set()
    finally:
        released.set()


class Interrupting(nn.Module):
    """Presses Ctrl-C in one shard."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, CLASSES)
        self.is_due = False

    def forward(self, x):
        if self.is_due and threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
        return self.layer(x)


@pytest.mark.parametrize("devices", [shared(2), shared(4)])
def test_ctrl_c_leaves_the_model_as_it_was(devices):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), Interrupting())
    with staged(model, {"1": 0, "2": 1}, devices=devices) as trainer:
        trainer.step(*BATCHES[0])
        before = state_of(trainer)
        model[2].is_due = True
        with pytest.raises(KeyboardInterrupt):
            trainer.step(*BATCHES[1])
        model[2].is_due = False
        if trainer.steps_done == 1:
            assert_same_bits(state_of(trainer), before)
        trainer.step(*BATCHES[1])
