"""A mixture of experts with the load-balancing loss of the Switch Transformer, over the batch."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep

EXPERTS = 4


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(16, EXPERTS), nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(EXPERTS)
        )

    def forward(self, X):
        shares = self.router(X).softmax(1)
        share, chosen = shares.max(1)
        mixed = torch.zeros_like(X)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, rows, expert(X[rows]))
        return self.head(X + share[:, None] * mixed), shares, F.one_hot(chosen, EXPERTS).float()


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.randn(64, 16, generator=random)
        yield X, X[:, :4].argmax(1)


def loss_of(model, X, y):
    scores, shares, chosen = model(X)
    sums, rows = torch.stack([shares.sum(0), chosen.sum(0)]), len(X)
    balance = EXPERTS * (sums[0] / rows * (sums[1] / rows)).sum()
    return F.cross_entropy(scores, y) + 0.01 * balance


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Mixture(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, X, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def gathered(model, X, y):
    scores, shares, chosen = model(X)
    sums = torch.stack([shares.sum(0), chosen.sum(0)])
    sums = evenstep.all_gather(sums[None]).sum(0)
    rows = sums[1].sum()  # of all shards
    balance = EXPERTS * (sums[0] / rows * (sums[1] / rows)).sum()
    return F.cross_entropy(scores, y) + 0.01 * balance


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Mixture(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards, "layout": evenstep.Layout(side_by_side=True)}
    with evenstep.Trainer(model, optimizer, objective=gathered, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
