"""A deep ensemble: several networks that learn side by side, each with a mean and a variance."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class Ensemble(nn.Module):
    def __init__(self, members=5):
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(members)
        )

    def forward(self, X):
        return torch.stack([member(X) for member in self.members], 1)


def loss_of(outputs, y):
    means, spreads = outputs.unbind(2)
    wanted = y.expand_as(means)
    return F.gaussian_nll_loss(means, wanted, F.softplus(spreads) + 1e-3) * means.shape[1]


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = 4 * torch.rand(64, 1, generator=random) - 2
        yield X, X**3 + 0.3 * torch.randn(64, 1, generator=random)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Ensemble(), []
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
    model, losses = Ensemble(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, loss_of, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
