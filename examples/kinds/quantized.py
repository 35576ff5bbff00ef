"""Quantisation-aware training: weights and activations are rounded, with step sizes that learn."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


def rounded(X, size):
    """Return multiples of `size`; the gradient passes through (Esser et al., 2020)."""
    scaled = (X / size).clamp(-8, 7)
    return (scaled + (scaled.round() - scaled).detach()) * size


class Quantized(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight_size = nn.Parameter(self.weight.detach().abs().mean() / 2)
        self.size = nn.Parameter(torch.tensor(0.3))

    def forward(self, X):
        weight = rounded(self.weight, self.weight_size)
        return F.linear(rounded(X, self.size), weight, self.bias)


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.randn(64, 16, generator=random)
        yield X, X[:, :4].argmax(1)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = nn.Sequential(Quantized(16, 32), nn.ReLU(), Quantized(32, 4)), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_function(model(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = nn.Sequential(Quantized(16, 32), nn.ReLU(), Quantized(32, 4)), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_function = nn.CrossEntropyLoss()
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, loss_function, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
