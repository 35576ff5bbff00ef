"""Metric learning with the hardest triplets: the far friends and near strangers of the batch."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def batches(steps):
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 16, generator=random)
    for _ in range(steps):
        y = torch.randint(8, (64,), generator=random)
        yield centres[y] + 0.5 * torch.randn(64, 16, generator=random), y


def hardest(far, alike):
    """Return the loss of rows whose distances from all others, and which are friends, are given."""
    friend = far.masked_fill(~alike, 0.0).amax(1)
    stranger = far.masked_fill(alike, 1e9).amin(1)
    return F.relu(friend - stranger + 0.5).mean()


def loss_of(model, X, y):
    codes = F.normalize(model(X))
    return hardest(2 - 2 * codes @ codes.T, y[:, None] == y)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = network(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, X, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def own_rows(model, X, y):
    codes = F.normalize(model(X))
    far = 2 - 2 * codes @ evenstep.all_gather(codes).T
    return hardest(far, y[:, None] == evenstep.all_gather(y))


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = network(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards, "layout": evenstep.Layout(side_by_side=True)}
    with evenstep.Trainer(model, optimizer, objective=own_rows, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
