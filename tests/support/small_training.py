"""A training that takes a moment: what it ends with, on any devices."""

import torch
from torch import nn

import evenstep


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def fingerprint_on(devices: int, **given) -> str:
    """Train on a number of CPU devices, on batches that no number of shards divides."""
    model, numbers = network(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=6, **given
    ) as trainer:
        for _ in range(3):
            X = torch.randn(23, 4, generator=numbers)
            trainer.step(X, torch.randint(3, (23,), generator=numbers))
        return trainer.fingerprint()
