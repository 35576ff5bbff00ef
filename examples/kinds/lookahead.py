"""Lookahead: every few steps the weights go half the way back to where they came from."""

import torch
from torch import nn

import evenstep


class Lookahead(torch.optim.Optimizer):
    """Zhang et al., 2019, around any optimizer, whose groups and state are its own."""

    def __init__(self, inside, every=3):
        self.inside, self.every, self.defaults = inside, every, inside.defaults
        self.param_groups, self.state = inside.param_groups, inside.state
        self.steps = 0

    def zero_grad(self, set_to_none=True):
        self.inside.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"] if self.steps == 0 else []:
                self.state[one]["slow"] = one.clone()
        self.inside.step()
        self.steps += 1
        for group in self.param_groups:
            for one in group["params"] if self.steps % self.every == 0 else []:
                one.copy_(self.state[one]["slow"].lerp_(one, 0.5))


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.randn(64, 16, generator=random)
        yield X, X[:, :4].argmax(1)


def plain(steps=7):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), []
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loss_function = nn.CrossEntropyLoss()
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_function(model(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=7):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), []
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loss_function = nn.CrossEntropyLoss()
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, loss_function, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
