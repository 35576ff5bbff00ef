"""Stages of about equal times: measured before the first step, told, and kept in checkpoints."""

import logging
import math
import types

import pytest
import torch
from torch import nn

import evenstep
from evenstep.stages import visits
from grouping import grouped
from reference import assert_same_bits
from trainers import open_trainer, sgd, state_of
from zoo import CLASSES, make_batches

BATCHES = make_batches((24, 17))
CLOCK = types.SimpleNamespace(now_s=0.0, cost_s={})
"""A clock that layers advance by their costs."""


class Spend(torch.autograd.Function):
    """The tensor itself, after a while forward, and as long backward."""

    @staticmethod
    def forward(ctx, tensor, name):
        ctx.name = name
        CLOCK.now_s += CLOCK.cost_s.get(name, 1.0)
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        CLOCK.now_s += CLOCK.cost_s.get(ctx.name, 1.0)
        return gradient, None


class Costly(nn.Linear):
    """A layer that takes the time which the clock has for its name."""

    def __init__(self, name, outputs=36):
        super().__init__(36, outputs)
        self.name = name

    def forward(self, x):
        return Spend.apply(super().forward(x).tanh(), self.name)


@pytest.fixture
def costs(monkeypatch):
    """Measure times by the clock; return the costs, to be changed."""
    CLOCK.cost_s = {}
    read = types.SimpleNamespace(perf_counter=lambda: CLOCK.now_s)
    monkeypatch.setattr(visits, "time", read)
    return CLOCK.cost_s


def chain():
    torch.manual_seed(0)
    layers = [Costly(name) for name in "abcde"]
    return nn.Sequential(nn.Flatten(), *layers, Costly("head", CLASSES))


def opened(model, stages="balanced:2:time", make=evenstep.Trainer, **options):
    devices = 2 if "2" in stages else 3
    options = {"devices": devices, "divide": evenstep.Stages(stages), "check": "off", **options}
    options = {"lost_after_s": math.inf, **options}  # of another clock
    return make(model, sgd(model), nn.CrossEntropyLoss(), **grouped(**options))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_slow_part_gets_a_stage_of_its_own(max_in_flight, costs, caplog):
    caplog.set_level(logging.INFO, logger="evenstep")
    costs["a"] = 9.0
    with opened(chain(), max_in_flight=max_in_flight) as trainer:
        assert trainer.stages == {"1": 0, "4": 1}  # of equal bytes
        trainer.predict([BATCHES[0][0]])
        assert trainer.stages == {"1": 0, "4": 1}
        for batch in BATCHES:
            trainer.step(*batch)
        trainer.waitall()
        assert trainer.stages == {"1": 0, "2": 1}
        assert trainer.trace.to_json()["otherData"]["stages"] == {"1": 0, "2": 1}
    (told,) = [one.getMessage() for one in caplog.records if "equal times" in one.getMessage()]
    assert "1 begins stage 0 (18000.0 ms a shard), 2 begins stage 1 (10000.0 ms a shard)" in told


@pytest.mark.parametrize("stages", ["balanced:2:time", "balanced:time"])
def test_measuring_does_not_move_a_bit(stages):
    states = []
    for layout in ({"devices": 1}, {"devices": 2, "divide": evenstep.Stages(stages)}):
        torch.manual_seed(0)
        convolution = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
        model = nn.Sequential(*convolution, nn.Dropout(0.3), nn.Linear(64, CLASSES))
        with open_trainer(model, **layout) as trainer:
            losses = [float(trainer.step(*batch)) for batch in BATCHES]
        states.append((state_of(trainer), losses))
    assert_same_bits(states[1][0], states[0][0])
    assert states[1][1] == states[0][1]


def test_a_resumed_training_keeps_the_stages(tmp_path, costs):
    costs["b"] = 9.0
    with opened(chain()) as trainer:
        trainer.step(*BATCHES[0])
        cut = trainer.stages
        trainer.save(tmp_path)
    assert cut == {"1": 0, "3": 1}
    costs["b"], costs["e"] = 1.0, 9.0

    def load(*given, **options):
        return evenstep.Trainer.load(tmp_path, *given, **options)

    with opened(chain(), make=load) as trainer:
        assert trainer.stages == cut
        trainer.step(*BATCHES[1])
        trainer.save(tmp_path)
        assert trainer.stages == cut
    with opened(chain(), make=load) as trainer:
        assert trainer.stages == cut
    with opened(chain(), "balanced:2", make=load) as trainer:
        assert trainer.stages == {"1": 0, "4": 1}
    with opened(chain(), "balanced:time", make=load) as trainer:  # three stages: measured again
        trainer.step(*BATCHES[1])
        assert trainer.stages == {"1": 0, "5": 1, "6": 2}
    assert evenstep.Trainer.load(tmp_path, *parts_of_a_trainer(), devices=1).stages is None


def parts_of_a_trainer():
    model = chain()
    return model, sgd(model), nn.CrossEntropyLoss()


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, CLASSES)

    def forward(self, x):
        if x.abs().max() > 1e3:
            raise LookupError("too large")
        return self.layer(x)


def test_a_shard_that_fails_while_it_is_measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), Failing())
    X, y = BATCHES[0]
    with opened(model) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(LookupError, match="too large") as caught:
            trainer.step(X * 1e6, y)
        assert any("in shard 0" in note for note in caught.value.__notes__)
        assert trainer.fingerprint() == before
        trainer.step(X, y)
        assert trainer.steps_done == 1


class Shared(nn.Module):
    """Calls its first part again after the second one."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = Costly("one"), Costly("two"), Costly("head", CLASSES)

    def forward(self, x):
        return self.head(self.one(self.two(self.one(x.flatten(1)))))


def test_parts_that_call_each_other_back_and_forth_are_measured(costs):
    """A cut between them would be refused; one behind them is not."""
    costs["head"] = 9.0
    with opened(Shared()) as trainer:
        trainer.step(*BATCHES[0])
        assert trainer.stages == {"one": 0, "head": 1}
