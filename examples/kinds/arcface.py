"""Metric learning with ArcFace: classes are directions, and the right angle gets a margin."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class ArcFace(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.centres = nn.Parameter(torch.randn(8, 8))

    def forward(self, X):
        return F.normalize(self.body(X)) @ F.normalize(self.centres).T


def loss_of(cosines, y):
    angles = cosines.clamp(-0.999, 0.999).acos()
    return F.cross_entropy(8 * (angles + 0.3 * F.one_hot(y, 8)).cos(), y)


def batches(steps):
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 16, generator=random)
    for _ in range(steps):
        y = torch.randint(8, (64,), generator=random)
        yield centres[y] + 0.5 * torch.randn(64, 16, generator=random), y


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = ArcFace(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = ArcFace(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, loss_of, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
