"""The promise on GPUs; skipped without one."""

import pytest
import torch
from torch import nn

import evenstep
from grouping import grouped
from reference import assert_same_bits, whole_state
from zoo import ZOO, build, make_batches, options_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def train(name, devices, **options):
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {**options_of(model), **options}
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), **grouped(devices=devices, **options)
    ) as trainer:
        losses = [float(trainer.step(X, y)) for X, y in make_batches((33, 16, 30))]
    return whole_state(model, optimizer), losses


@pytest.mark.parametrize("name", ZOO)
def test_one_lane_two_lanes_and_a_second_run_give_the_same_bits(name):
    one, losses = train(name, ["cuda:0"])
    for devices in (["cuda:0"], ["cuda:0", "cuda:0"]):
        state, other = train(name, devices)
        assert_same_bits(state, one)
        assert other == losses


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here, or none")
@pytest.mark.parametrize("name", ZOO)
def test_two_gpus_are_one(name):
    one, losses = train(name, ["cuda:0"])
    two, other = train(name, ["cuda:0", "cuda:1"])
    assert_same_bits(two, one)
    assert other == losses


def test_a_gpu_and_a_cpu_are_equal_within_rounding_and_say_so():
    _, losses = train("convolution", ["cpu:0"])
    _, mixed = train("convolution", ["cuda:0", "cpu:0"])
    assert mixed == pytest.approx(losses, rel=1e-4)
