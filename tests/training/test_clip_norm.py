"""`clip_norm=` is torch's `clip_grad_norm_` on the mean gradient, on any devices."""

import functools
import math

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import CheckpointError, InputError, ModelError
from grouping import grouped
from reference import assert_same_bits, whole_state
from trainers import LAYOUTS, open_trainer, sgd
from zoo import build, make_batches

SIZES = (24, 17, 24)
LIMIT = 0.05


def trained(devices=1, make_optimizer=sgd, **options):
    """Return the state, and the norm of each step's gradient."""
    model = build("convolution")
    optimizer = make_optimizer(model)
    with open_trainer(model, optimizer=optimizer, devices=devices, **options) as trainer:
        losses = [trainer.step(X, y) for X, y in make_batches(SIZES)]
        norms = [loss.outputs.get("grad_norm") for loss in losses]
    return whole_state(model, optimizer), norms


def clipped_by_torch():
    norms = []

    def clip(model):
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))

    return trained(before_update=clip)[0], norms


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_it_is_torchs_to_the_bit(devices, in_flight):
    expected, norms = clipped_by_torch()
    state, found = trained(devices, clip_norm=LIMIT, max_in_flight=in_flight)
    assert_same_bits(state, expected)
    assert found == norms
    assert min(norms) > LIMIT


def test_a_small_gradient_is_left_as_it_is():
    state, norms = trained(clip_norm=1e6)
    expected, none = trained()
    assert_same_bits(state, expected)
    assert none == [None] * len(SIZES)
    assert all(0 < norm < 1e6 for norm in norms)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_it_comes_after_before_update(in_flight):
    def double(model):
        for parameter in model.parameters():
            parameter.grad.mul_(2)

    _, plain = trained(clip_norm=LIMIT)
    _, doubled = trained(clip_norm=LIMIT, before_update=double, max_in_flight=in_flight)
    assert doubled[0] == pytest.approx(2 * plain[0])


def test_an_optimizer_that_evaluates_often_gets_clipped_gradients():
    lbfgs = lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)  # noqa: E731
    options = {"memory_format": "contiguous", "make_optimizer": lbfgs, "clip_norm": LIMIT}
    one, norms = trained(1, **options)
    three, others = trained(3, **options)
    assert_same_bits(one, three)
    assert norms == others
    assert None not in norms


def test_it_belongs_to_the_experiment(tmp_path):
    def make(cls, **options):
        model = build("convolution")
        return cls(model, sgd(model), nn.CrossEntropyLoss(), devices=1, **grouped(**options))

    ((X, y),) = make_batches((24,))
    with make(evenstep.Trainer, clip_norm=LIMIT) as trainer:
        trainer.step(X, y)
        trainer.save(tmp_path)
    load = functools.partial(make, functools.partial(evenstep.Trainer.load, tmp_path))
    assert load().experiment.clip_norm == LIMIT
    with pytest.raises(CheckpointError, match="clip_norm"):
        load(clip_norm=1.0)


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, 10**400, "1", True], ids=str)
def test_what_is_no_limit_is_refused(wrong):
    with pytest.raises(InputError, match="clip_norm=.*a number above 0"):
        trained(clip_norm=wrong)


def test_an_output_of_that_name_is_refused():
    def objective(model, X, y):
        return nn.functional.cross_entropy(model(X), y), 1, {"grad_norm": 1.0}

    options = {"objective": objective, "clip_norm": 1.0, "separable": False}
    ((X, y),) = make_batches((24,))
    with (
        open_trainer(build("convolution"), **options) as trainer,
        pytest.raises(ModelError, match="an output 'grad_norm'"),
    ):
        trainer.step(X, y)
    assert trainer.steps_done == 0
