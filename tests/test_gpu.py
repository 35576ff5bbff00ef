"""The promise on an accelerator, of any kind and also the emulated one; skipped without one."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.devices import accelerator
from grouping import grouped
from reference import assert_same_bits, whole_state
from zoo import ZOO, build, make_batches, options_of

KIND = accelerator.kind_here()
ONE, COUNT = f"{KIND}:0", accelerator.count_here()
UNFIT = {"recurrent", "mixed_dtypes"} if KIND == "emu" else set()
"""What the emulated accelerator can't do: see accelerator/test_golden.py."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND is None, reason="no accelerator here"),
]
EVERY_MODEL = pytest.mark.parametrize("name", [name for name in ZOO if name not in UNFIT])


def train(name, devices, **options):
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {**options_of(model), **options}
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), **grouped(devices=devices, **options)
    ) as trainer:
        losses = [float(trainer.step(X, y)) for X, y in make_batches((33, 16, 30))]
    state = whole_state(model, optimizer)
    return {name: one.cpu() if torch.is_tensor(one) else one for name, one in state.items()}, losses


@EVERY_MODEL
def test_one_lane_two_lanes_and_a_second_run_give_the_same_bits(name):
    one, losses = train(name, [ONE])
    for devices in ([ONE], [ONE, ONE]):
        state, other = train(name, devices)
        assert_same_bits(state, one)
        assert other == losses


@pytest.mark.skipif(COUNT < 2, reason="one accelerator here, or none")
@EVERY_MODEL
def test_two_gpus_are_one(name):
    one, losses = train(name, [ONE])
    two, other = train(name, [ONE, f"{KIND}:1"])
    assert_same_bits(two, one)
    assert other == losses


def test_a_gpu_and_a_cpu_are_equal_within_rounding_and_say_so():
    _, losses = train("convolution", ["cpu:0"])
    _, mixed = train("convolution", [ONE, "cpu:0"])
    assert mixed == pytest.approx(losses, rel=1e-4)
