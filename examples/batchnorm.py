"""Batch normalization on several devices: statistics of each shard, or of the whole batch.

    python examples/batchnorm.py

On k devices, a BatchNorm layer usually sees only the part of the batch on its own device, so its
result depends on k. With "shard" it sees one shard, so its result depends on V. With "sync" it sees
the whole batch, and its result does not depend on V, except for rounding. Both give the same bits
on any number of devices. Statistics of shards with few examples are noisy: compare the accuracies.
"""

import torch
from torch import nn

import evenstep
from evenstep.data import Loader, digits

BATCH, EPOCHS = 32, 8


def make_net():
    """Return a small convolutional network with batch normalization and fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 10)),
    )


def train(batch_norm, shards, devices):
    """Train on digits and return the test accuracy and the fingerprint."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader, test = Loader(digits(), BATCH, drop_last=True), Loader(digits(train=False), 256)
    experiment = evenstep.Experiment(shards=shards, batch_norm=batch_norm)
    options = {"devices": devices, "experiment": experiment}
    with evenstep.Trainer(net, optimizer, nn.CrossEntropyLoss(), **options) as trainer:
        for _ in range(EPOCHS):
            for X, y in trainer.epoch(loader):
                trainer.step(X, y)
        accuracy = trainer.evaluate(test, {"a": evenstep.metrics.accuracy})["a"]
        return accuracy, trainer.fingerprint()[:12]


if __name__ == "__main__":
    for batch_norm, shards in (("shard", 2), ("shard", 16), ("sync", 2), ("sync", 16)):
        (accuracy, one), (_, two) = (train(batch_norm, shards, devices) for devices in (1, 2))
        same = "the same" if one == two else "DIFFERENT"
        print(f"{batch_norm:5} V = {shards:2}  accuracy {accuracy:.3f}  1 and 2 devices: {same}")
