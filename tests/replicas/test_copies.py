"""Copies of a model for further devices."""

import pytest
import torch
from torch import nn

from evenstep.replicas.replica import sum_of_bits
from layouts import TWO, own
from reference import assert_same_bits
from trainers import open_trainer, state_of
from zoo import make_batches


class Keeping(nn.Module):
    """Keeps results of its forward pass in attributes, for somebody to look at."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.utils.spectral_norm(nn.Linear(36, 5))  # keeps its weight in an attribute
        self.scores, self.shown = None, {}

    def forward(self, x):
        self.scores = self.head(x.flatten(1))
        self.shown["by layer"] = [self.scores * 2]
        return self.scores


def train(**layout):
    """Train a model that has seen a batch before, as a summary of its layers does."""
    model = Keeping()
    model(make_batches([4])[0][0])
    with open_trainer(model, **layout) as trainer:
        for batch in make_batches([16, 16]):
            trainer.step(*batch)
    return state_of(trainer)


@pytest.mark.parametrize(
    "layout",
    [{"devices": own(2)}, {"devices": TWO}, {"devices": TWO, "max_in_flight": 2}],
    ids=["own memory", "shared memory", "in flight"],
)
def test_a_model_that_keeps_results_of_an_earlier_forward_pass(layout):
    assert_same_bits(train(**layout), train(devices=1))


def test_a_second_training_of_a_model_that_keeps_results():
    model = Keeping()
    (X, y), *_ = make_batches([16])
    for devices in (1, 2):
        with open_trainer(model, devices=devices) as trainer:
            trainer.step(X, y)
    assert model.scores is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.neg_(),
        lambda tensor: tensor.mul_(2),
        lambda tensor: tensor[-1].add_(1),
        lambda tensor: tensor.zero_(),
    ],
    ids=["negated", "doubled", "one row", "zeros"],
)
@pytest.mark.parametrize("place", ["contiguous", "channels_last", "odd", "inside"])
def test_the_sum_of_bits_is_another_after_a_write(dtype, write, place):
    """Also where a sum of 32 bits would wrap around to the same number."""
    tensor = torch.randn(64, 16, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    if place == "channels_last":
        tensor = tensor.to(memory_format=torch.channels_last)
    elif place == "odd":
        tensor = tensor.reshape(-1)[:1023].clone()
    elif place == "inside":
        tensor = tensor.reshape(-1)[1:]
    before = int(sum_of_bits(tensor))
    assert before == int(sum_of_bits(tensor))
    write(tensor)
    assert int(sum_of_bits(tensor)) != before
