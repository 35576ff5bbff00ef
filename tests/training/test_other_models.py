"""`evaluate` and `predict` of another model of the same structure, such as an average."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evenstep.errors import ModelError
from evenstep.metrics import accuracy
from layouts import own
from reference import assert_same_bits, whole_state
from trainers import open_trainer, take_steps
from zoo import build, make_batches

BATCHES = make_batches((24, 17, 24))
LAYOUTS = [1, 2, own(3)]


def averaged(devices, **options):
    """Train with an average of the weights; return what is measured of it, and the state."""
    model = build("convolution")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    options |= {"devices": devices, "after_update": ema.update_parameters}
    with open_trainer(model, **options) as trainer:
        measured = []
        for batch in BATCHES:
            trainer.step(*batch)
            trainer.waitall()
            state = whole_state(model, trainer.optimizer)
            metrics = {"accuracy": accuracy, "loss": loss}
            found = trainer.evaluate(BATCHES, metrics, model=ema.module)
            rows = trainer.predict(BATCHES, model=ema.module)
            assert_same_bits(whole_state(model, trainer.optimizer), state)
            measured.append((found, rows.tolist()))
    return measured, trainer.fingerprint(), ema.module


def loss(output, y):
    return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_average_is_measured_and_training_goes_on_as_without(in_flight):
    expected, fingerprint, _ = averaged(1)
    for devices in LAYOUTS:
        found, other, _ = averaged(devices, max_in_flight=in_flight)
        assert found == expected
        assert other == fingerprint
    assert fingerprint == untouched()


def untouched():
    trainer = open_trainer(build("convolution"), devices=1)
    take_steps(trainer, BATCHES)
    return trainer.fingerprint()


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_it_is_the_other_model_that_is_measured(devices):
    _, _, ema = averaged(1)
    model = build("convolution", seed=3)
    with open_trainer(model, devices=devices) as trainer:
        of_other = trainer.predict(BATCHES, model=ema)
        of_own = trainer.predict(BATCHES)
    with open_trainer(ema, devices=1) as trainer:
        assert torch.equal(of_other, trainer.predict(BATCHES))
    assert not torch.equal(of_other, of_own)


def test_an_error_gives_the_model_its_own_values_back():
    model, other = build("batch_norm"), build("batch_norm", seed=3)

    def broken(output, y):
        raise RuntimeError("broken")

    with open_trainer(model, devices=2) as trainer:
        before = whole_state(model, trainer.optimizer)
        with pytest.raises(RuntimeError, match="broken"):
            trainer.evaluate(BATCHES, {"broken": broken}, model=other)
        assert_same_bits(whole_state(model, trainer.optimizer), before)


def test_another_structure_is_refused():
    model = build("convolution")
    wider = copy.deepcopy(model)
    wider[-1] = nn.Linear(20, 7)
    with open_trainer(model, devices=1) as trainer:
        for other, said in (
            (wider, r"shape \(7, 20\) named 4.weight, the trainer's model shape \(5, 20\)"),
            (AveragedModel(model), r"\.module"),
        ):
            with pytest.raises(ModelError, match=said):
                trainer.evaluate(BATCHES, {"accuracy": accuracy}, model=other)
