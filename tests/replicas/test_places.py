"""Parameters and buffers at any address train to the same bits as at multiples of 64 bytes."""

import pytest
import torch
from torch import nn

import evenstep
from places import WAYS, Peeled, Projected, aligned_clone, generator
from reference import assert_same_bits, reference_training, whole_state
from trainers import sgd

LAYOUTS = [1, 2, ["cpu:0", "cpu:1:own"], ["cpu:0:own", "cpu:1:own"]]
OPTIONS = {"shards": 4, "memory_format": "contiguous"}


def build():
    torch.manual_seed(0)
    return nn.Sequential(Peeled(13, 9), nn.Tanh(), Peeled(9, 5), Projected(5))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(12, 13), torch.randint(0, 5, (12,))) for _ in range(3)]


def reference(model):
    return reference_training(
        aligned_clone(model), lambda own: torch.optim.SGD(own, 0.1, momentum=0.9), batches(),
        shards=4,
    )  # fmt: skip


def train(model, devices, **options):
    optimizer = sgd(model)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=devices, **OPTIONS, **options
    ) as trainer:
        for X, y in batches():
            trainer.step(X, y)
    return whole_state(model, optimizer)


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_parameters_at_any_address_train_to_the_same_bits(way, devices):
    model = build()
    expected, _ = reference(model)
    for seed in range(2):
        model = build()
        kept = way(model, generator(seed))
        assert any(one.data_ptr() % 64 for one in model.parameters())
        assert_same_bits(train(model, devices), expected)
        del kept
