"""Contrastive predictive coding: what comes next is told from what comes next in other rows."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class Cpc(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.context = nn.Linear(8, 16), nn.GRU(16, 16, batch_first=True)
        self.ahead = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, waves):
        codes = self.encoder(waves)
        seen = self.context(codes[:, :-3])[0][:, -1]
        return [one(seen) for one in self.ahead], codes[:, -3:].unbind(1)


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = 6.28 * torch.rand(32, 1, 1, generator=random)
        times = torch.arange(10.0)[:, None] * torch.linspace(0.1, 0.8, 8)
        yield (starts + times).sin(), torch.arange(32)


def loss_of(model, waves, index):
    guesses, codes = model(waves)
    pairs = zip(guesses, codes, strict=True)
    return sum(F.cross_entropy(guess @ code.T, index) for guess, code in pairs) / 3


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Cpc(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for waves, index in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, waves, index)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def own_rows(model, waves, index):
    guesses, codes = model(waves)
    pairs = zip(guesses, map(evenstep.all_gather, codes), strict=True)
    return sum(F.cross_entropy(guess @ code.T, index) for guess, code in pairs) / 3


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Cpc(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards, "layout": evenstep.Layout(side_by_side=True)}
    with evenstep.Trainer(model, optimizer, objective=own_rows, **options) as trainer:
        for waves, index in batches(steps):
            loss = trainer.step(waves, index)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
