"""Muon for the matrices inside a network, and AdamW for everything else."""

import torch
from torch import nn

import evenstep


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.randn(64, 16, generator=random)
        yield X, X[:, :4].argmax(1)


def network():
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def optimizers(model):
    others = [one for one in model.parameters() if one is not model[2].weight]
    return torch.optim.Muon([model[2].weight], lr=0.02), torch.optim.AdamW(others, lr=0.01)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = network(), []
    muon, adam = optimizers(model)
    loss_function = nn.CrossEntropyLoss()
    for X, y in batches(steps):
        muon.zero_grad()
        adam.zero_grad()
        loss = loss_function(model(X), y)
        loss.backward()
        muon.step()
        adam.step()
        losses.append(loss.item())
    return model, (muon, adam), losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = network(), []
    muon, adam = optimizers(model)
    loss_function = nn.CrossEntropyLoss()
    options = {"devices": devices, "shards": shards, "state": {"adam": adam}}
    with evenstep.Trainer(model, muon, loss_function, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.backward(X, y)
            muon.step()
            adam.step()
            losses.append(loss.item())
    return model, (muon, adam), losses


if __name__ == "__main__":
    print(even()[-1])
